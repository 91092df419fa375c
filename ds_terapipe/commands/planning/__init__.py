"""Code shared by ``plan`` and ``simulate``."""
