"""Subcommands of ``ds_terapipe``, one per file.

The docstring of each is its help: a title, a paragraph, an example. ``add_arguments`` fills its parser. ``run`` runs it, and
raises ConfigError for what the user can mend; `cli.main` prints its line.
"""
