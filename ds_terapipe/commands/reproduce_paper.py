"""Simulate the ten settings of the TeraPipe paper beside their published times.

Simulate the settings of the TeraPipe paper (ICML 2021) without slices, with the paper's slices, with equal ones, and
with our best ones. At most seven figures without slices or with equal ones calibrate the model. Each figure with the
paper's slices is a prediction.

example:
  ds_terapipe reproduce-paper
  ds_terapipe reproduce-paper --uncalibrated           from the datasheets alone
  ds_terapipe reproduce-paper --json paper.json
"""

from __future__ import annotations

import argparse

from ds_terapipe.commands.output import check_positive, show
from ds_terapipe.commands.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument(
        "--uncalibrated", action="store_true", help="take the rates of the datasheets, without calibration"
    )
    parser.add_argument(
        "--granularity",
        type=int,
        default=8,
        metavar="TOKENS",
        help="divisor of the lengths of our best slices (default: %(default)s, as in the paper)",
    )


def run(options: argparse.Namespace) -> None:
    """Print published and simulated times."""
    check_positive(options, ("granularity",))
    from ds_terapipe.plan.paper.predicted import reproduce

    with progress("simulating the paper's settings"):
        result = reproduce(calibrated=not options.uncalibrated, granularity=options.granularity)
    show(options, result.table(), result.as_json())
