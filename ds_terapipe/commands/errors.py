"""The error of a subcommand."""

from __future__ import annotations


class CommandError(Exception):
    """What the command says on one line before it ends."""
