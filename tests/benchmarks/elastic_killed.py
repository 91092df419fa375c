"""Benchmark of recovery from random kills, with weights compared to a run without kills.

``python -m tests.benchmarks.elastic_killed --points 20 --seed 1`` trains a small GPT with dropout in two processes,
from two stages to two replicas and back, twice, while layers freeze, with a save every other step
(tests/elastic/killed.py). One process gets SIGKILL: half of the times at any moment, half of the times in a file
operation of a save. The command is run again, up to three of those are killed, too, and the last goes on to the end.
Checkpoints, losses and weights have to be those of the run without kills, to the bit.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from tests.benchmarks import measure
from tests.elastic.killed import random_kills, run_killed, run_whole


def main() -> None:
    """Run the benchmark. Exit status 1 when anything differs."""
    options = measure.parser("elastic_killed", __doc__)
    options.add_argument("--points", type=int, default=20, help="so many kills (default 20; 1 with --quick)")
    options.add_argument("--seed", type=int, default=1, help="of the points (default 1)")
    options.add_argument("--cached", action="store_true", help="with the outputs of frozen layers kept in memory")
    options = options.parse_args()
    wanted = 1 if options.quick else options.points
    dice, wrong, points, run = random.Random(options.seed), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        whole = run_whole(Path(folder) / "whole", "fp32", options.cached)
        while points < wanted:
            run += 1
            kills = random_kills(dice, min(dice.choice((1, 2, 3, 4)), wanted - points))
            rows, different = run_killed(kills, whole, Path(folder) / f"run{run}")
            for row in rows:
                points += row.died
                print(f"run {run}, from step {row.resumed}, rank {row.kill.victim} {row.where}: {row.said}", flush=True)
            found = [*(text for row in rows for text in row.wrong), *different]
            print("".join(f"    {text}\n" for text in found), end="", flush=True)
            wrong += found
    print(f"{points} kills in {run} runs, {len(wrong)} things wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
