"""The subcommands of ``ds_terapipe``, one a file: ``add`` puts it into the parser, ``run`` is what it does."""
