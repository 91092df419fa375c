"""The command ``ds_terapipe``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ds_terapipe.commands.output import add_json, check_json
from ds_terapipe.errors import ConfigError
from ds_terapipe.version import __version__

# Files of ds_terapipe/commands, as the help lists them.
COMMANDS = (
    "plan", "check", "simulate", "prepare_data", "report", "reproduce_paper", "trace", "shapes", "export", "schema", "same_loss",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status is 0, 1 after an error, 2 after a wrong argument."""
    options = build_parser().parse_args(arguments)
    try:
        check_json(options)
        options.run(options)
    except ConfigError as error:
        print(f"ds_terapipe {options.command}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe; nothing is left to be flushed into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"ds_terapipe {options.command}: stopped", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command; every subcommand sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="ds_terapipe", description="Tools for token slices, freezing and FusedLamb in DeepSpeed trainings."
    )
    parser.add_argument("--version", action="version", version=f"ds_terapipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in COMMANDS:
        command = import_module(f"ds_terapipe.commands.{name}")
        title, description, example = (command.__doc__ or "\n\n\n\n").split("\n\n", 2)  # none with python -OO
        its = commands.add_parser(
            name.replace("_", "-"), help=title[:1].lower() + title[1:].removesuffix("."),
            description=" ".join(description.split()), epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_arguments(its)
        its.set_defaults(run=command.run)
        if name != "schema":  # which prints JSON in any case
            add_json(its)
    return parser


if __name__ == "__main__":
    sys.exit(main())
