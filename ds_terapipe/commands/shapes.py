"""Print or draw the shapes of an elastic pipeline.

Print or draw the shapes of a training with elastic_pipeline, with the layers of each process.

example:
  ds_terapipe shapes history.jsonl                          steps, shapes, layers of each process
  ds_terapipe shapes history.jsonl --output shapes.svg
"""

from __future__ import annotations

import argparse

from ds_terapipe.commands.output import show, write_text
from ds_terapipe.elastic.shapes.history import read_history
from ds_terapipe.elastic.shapes.picture import shapes_svg, shapes_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("file", metavar="FILE", help="file of elastic_pipeline.history_path")
    parser.add_argument("--output", metavar="FILE", help="draw the shapes into an SVG file, in place of the text")


def run(options: argparse.Namespace) -> None:
    """Print the shapes, or draw them."""
    periods = read_history(options.file)
    text = shapes_text(periods)
    if options.output:
        write_text("--output", options.output, shapes_svg(periods))
        text = f"written to {options.output}"
    show(options, text, {"periods": [period.as_json() for period in periods]})
