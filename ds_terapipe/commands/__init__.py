"""Subcommands of ``ds_terapipe``, one per file: ``add`` adds its parser, ``run`` runs it."""
