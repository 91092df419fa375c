"""Subcommands of ``ds_terapipe``, one per file.

Each has ``HELP``, ``DESCRIPTION``, and ``EXAMPLE``, which ends its help. ``add_arguments`` fills its parser. ``run`` runs it, and
raises ConfigError for what the user can mend; `cli.main` prints its line.
"""
