"""The error of a subcommand."""

from __future__ import annotations


class CommandError(Exception):
    """An error of a command, printed on one line before it ends."""
