"""A run with transitions and saves that is killed at random points: it goes on from its last checkpoint as if nothing had been.

``python -m tests.benchmarks.elastic_killed --points 20 --seed 1`` trains a small GPT with dropout in two processes, fixed slices
and ``training_data``, from two stages to two replicas and back, twice, while layers freeze, with a save every other step
(tests/elastic/killed.py). One of the processes gets SIGKILL: half of the times at any moment, half of the times before or in the
middle of a file operation of a save. The same command is run again, up to three of those are killed, too, and the last goes on to
the end. After each kill what stands under a checkpoint's name has to be, file by file, what a run that nobody killed had saved
there, and in the end every loss and weight has to be that run's, to the bit. Some minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.elastic.killed import Row, random_kills, run_killed, run_whole
from tests.elastic.training import PRECISIONS

KILLS_OF_A_RUN = (1, 2, 3, 4)
SAID = 60  # characters


def line(number: int, run: int, row: Row) -> str:
    """Of the table."""
    verdict = "whole" if not row.wrong else "WRONG"
    begun = f"step {row.resumed}" if row.resumed else "start"
    said = row.said if len(row.said) <= SAID else row.said[: SAID - 3] + "..."
    return (
        f"{number if row.died else '-':>5}  {run:>3}  {begun:>9}  {row.kill.victim:>4}  {row.where:<62}  "
        f"{verdict if row.died else 'over before'}  {said}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.elastic_killed", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--points", type=int, default=20, help="so many kills (default 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the points (default 1)")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="fp32", help="default fp32")
    parser.add_argument("--cached", action="store_true", help="with the outputs of frozen layers kept in memory")
    parser.add_argument("--json", metavar="FILE", help="write every point there")
    options = parser.parse_args(arguments)
    if options.points < 1:
        parser.error(f"--points: got {options.points}, must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status 1 when anything differs."""
    options = parse(arguments)
    dice, rows, wrong, points, run = random.Random(options.seed), [], [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        whole = run_whole(Path(folder) / "whole", options.precision, options.cached)
        print("point  run  goes on at  rank  killed" + " " * 58 + "checkpoints  the other rank said", flush=True)
        while points < options.points:
            run += 1
            kills = random_kills(dice, min(dice.choice(KILLS_OF_A_RUN), options.points - points))
            found, different = run_killed(kills, whole, Path(folder) / f"run{run}")
            for row in found:
                points += row.died
                print(line(points, run, row))
                print("".join(f"    {text}\n" for text in row.wrong), end="", flush=True)
                wrong += row.wrong
            print("".join(f"    run {run}: {text}\n" for text in different), end="", flush=True)
            wrong += different
            rows += [{"run": run, **asdict(row)} for row in found]
    verdict = "losses and weights equal to the bit, checkpoints whole" if not wrong else f"{len(wrong)} things WRONG"
    kept = ", cached" if options.cached else ""
    print(f"{points} kills in {run} runs ({options.precision}{kept}): {verdict}")
    if options.json:
        Path(options.json).write_text(json.dumps({"points": rows, "wrong": wrong}, indent=1), encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
