"""Benchmark of recovery from random kills, with checkpoints, losses and weights compared to a run without kills, to the bit.

``python -m tests.benchmarks.elastic_killed --points 20 --seed 1`` kills a process of tests/elastic/killed.py's run, half of the
times at any moment, half of the times in a file operation of a save. It runs the command again, kills up to three of those runs,
too, and lets the last go on to the end.
"""

import random
import tempfile
from pathlib import Path

from tests.benchmarks import measure
from tests.elastic.killed import random_kills, run_killed, run_whole


def main() -> None:
    parser = measure.parser("elastic_killed", __doc__)
    parser.add_argument("--points", type=int, default=20, help="so many kills (default 20; 1 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="of the points (default 1)")
    parser.add_argument("--cached", action="store_true", help="with the outputs of frozen layers kept in memory")
    options = parser.parse_args()
    wanted, points, run, wrong = 1 if options.quick else options.points, 0, 0, 0
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = run_whole(Path(folder) / "whole", options.cached)
        while points < wanted:
            run += 1
            kills = random_kills(dice, min(dice.choice((1, 2, 3, 4)), wanted - points))
            rows, different = run_killed(kills, whole, Path(folder) / f"run{run}")
            for row in rows:
                print(f"run {run}, from step {row.resumed}, rank {row.kill.victim} {row.where}: {row.said}", flush=True)
            found = [*(text for row in rows for text in row.wrong), *different]
            print("".join(f"    {text}\n" for text in found), end="", flush=True)
            points, wrong = points + sum(row.died for row in rows), wrong + len(found)
    print(f"{points} kills in {run} runs, {wrong} things wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
