"""Numbers among the arguments of subcommands, and their output: a table, ``--json FILE`` beside it, and further files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ds_terapipe.errors import ConfigError, bad_value


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json FILE``."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the figures as JSON too. The name - stands for standard output, in place of the table",
    )


def check_json(options: argparse.Namespace) -> None:
    """Raise ConfigError, before the work, where the file of ``--json`` cannot be written."""
    path = getattr(options, "json", None)
    if path and path != "-":
        there = Path(path).exists()
        write_text("--json", path, "", mode="a")
        if not there:
            Path(path).unlink()


def check_positive(options: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise ConfigError for an argument among these that is below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise bad_value(f"--{name.replace('_', '-')}", value, "a positive number", "e.g. 8")


def show(options: argparse.Namespace, text: str, data: Mapping[str, Any]) -> None:
    """Print the table, and write the same figures as JSON to the file of ``--json``."""
    if options.json == "-":
        json.dump(data, sys.stdout, indent=2)
        print()
        return
    print(text)
    if options.json:
        write_text("--json", options.json, json.dumps(data, indent=2) + "\n")


def write_text(argument: str, path: str, text: str, mode: str = "w") -> None:
    """Write a file that an argument names. Raises ConfigError where it cannot be written."""
    with writing(argument, path), open(path, mode, encoding="utf-8") as file:
        file.write(text)


@contextmanager
def writing(argument: str, path: str) -> Iterator[None]:
    """Context manager that raises ConfigError, in the name of an argument, where its file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{argument}: cannot write {path} ({error.strerror or error}), must be in a directory that you may write to"
        ) from error
