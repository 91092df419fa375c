"""``ds_terapipe shapes``: which shape a training had at which step, from the file of ``elastic_pipeline.history_path``."""

from __future__ import annotations

import argparse

from ds_terapipe.commands.output import show
from ds_terapipe.commands.planning.inputs import write_text
from ds_terapipe.elastic.shapes.history import read_history
from ds_terapipe.elastic.shapes.picture import shapes_svg, shapes_text

EXAMPLE = """\
example:
  ds_terapipe shapes history.jsonl                          steps, shapes, layers of each process
  ds_terapipe shapes history.jsonl --output shapes.svg
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the subcommand to the parser of ``ds_terapipe``."""
    parser = commands.add_parser(
        "shapes",
        help="print or draw the shapes of an elastic pipeline",
        description="Print or draw the shapes of a training with elastic_pipeline, with the layers of each process.",
    )
    parser.add_argument("file", metavar="FILE", help="file of elastic_pipeline.history_path")
    parser.add_argument("--output", metavar="FILE", help="draw the shapes into an SVG file, and print nothing")
    return parser


def run(options: argparse.Namespace) -> None:
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
