"""Run a launch with our keys and without, and compare the losses.

Run a launch on this machine twice for a few steps, with our keys and with the keys disabled. Compare the losses.
Dropout and gradient_clipping must be 0, and both runs must read the same data.

example:
  ds_terapipe same-loss -- deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config ds_config.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

from ds_terapipe.commands.output import check_positive, show
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import SAME_LOSS

_SHOWN = 30  # lines of a launch that failed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of each run (default: 10)")
    parser.add_argument(
        "--most", type=float, default=1e-3, metavar="SHARE", help="largest relative difference (default: 0.001)"
    )
    parser.add_argument("launch", nargs="+", metavar="-- COMMAND", help="command of the launch")


def run(options: argparse.Namespace) -> None:
    """Print the losses of both runs and their differences."""
    check_positive(options, ("steps",))
    ours, plain = (_losses(options.launch, options.steps, keys) for keys in (True, False))
    if len(ours) != len(plain):
        raise ConfigError(f"got {len(ours)} steps with our keys and {len(plain)} without, must be as many")
    rows = [(a, b, abs(a - b) / abs(b) if b else abs(a - b)) for a, b in zip(ours, plain, strict=True)]
    largest = float(np.max(rows, axis=0)[2])  # a NaN, too, which Python's max may pass over
    lines = [f"{'step':>4} {'with':>14} {'without':>14} {'difference':>11}"]
    lines += [f"{n:4} {a:14.6f} {b:14.6f} {difference:11.1e}" for n, (a, b, difference) in zip(count(1), rows)]
    lines.append(f"largest relative difference of {len(rows)} steps: {largest:.1e}")
    show(options, "\n".join(lines), {"with": ours, "without": plain, "largest": largest})
    if not largest <= options.most:
        raise ConfigError(f"the losses differ by {largest:.1e}, must be at most {options.most:g} (--most)")


def _losses(launch: Sequence[str], steps: int, keys: bool) -> list[float]:
    """Return the losses of a run's first steps."""
    name = "with our keys" if keys else "without our keys"
    print(f"{name}: {' '.join(launch)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "losses"), Path(folder, "output")
        environment = os.environ | {SAME_LOSS: json.dumps([str(path), steps, keys])}
        with output.open("wb") as file:
            try:
                code = subprocess.run(launch, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
            except OSError as error:
                raise ConfigError(f"cannot start {launch[0]} ({error.strerror or error})") from error
        found = [float(line) for line in path.read_text().split()] if path.exists() else []
        if code or not found:
            print(*output.read_text(errors="replace").splitlines()[-_SHOWN:], sep="\n", file=sys.stderr)
            raise ConfigError(
                f"the run {name} ended with {code} after {len(found)} steps, must train {steps}, see above"
            )
        return found
