"""``ds_terapipe shapes``: which shape a training had at which step, from the file of ``elastic_pipeline.history_path``."""

from __future__ import annotations

import argparse

from ds_terapipe.commands.output import add_json, show
from ds_terapipe.commands.planning.inputs import write_text
from ds_terapipe.elastic.shapes.history import read_history
from ds_terapipe.elastic.shapes.picture import shapes_svg, shapes_text

EXAMPLE = """\
example:
  ds_terapipe shapes history.jsonl                          steps, shapes, and who had which layers
  ds_terapipe shapes history.jsonl --output shapes.svg
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand to the parser of ``ds_terapipe``."""
    parser = commands.add_parser(
        "shapes",
        help="show or draw which shape an elastic pipeline had at which step",
        description="Print the shapes that a training with elastic_pipeline had, with the layers of each process, or draw "
        "them. The file is written by elastic_pipeline.history_path.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="what elastic_pipeline.history_path names")
    parser.add_argument("--output", metavar="FILE", help="draw them as an SVG file in place of printing them")
    add_json(parser)
    parser.set_defaults(run=shapes)


def shapes(options: argparse.Namespace) -> None:
    """Print the shapes, or draw them.

    Raises:
        ConfigError: no such file, one that is none, or one that cannot be written. CommandError: the file of ``--json`` cannot be
            written.
    """
    periods = read_history(options.file)
    text = shapes_text(periods)
    if options.output:
        write_text("--output", options.output, shapes_svg(periods))
        text = f"written to {options.output}"
    show(options, text, {"periods": [period.as_json() for period in periods]})
