"""Subcommands of ``ds_terapipe``, one per file: ``add`` makes its parser, ``run`` runs it, ``EXAMPLE`` ends its help."""
