"""Compares two logs of train.py --log-file: the difference of the losses, the ratio of the speeds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median


def read(path: Path) -> list[dict[str, float]]:
    """The lines of a log, one dictionary for each iteration."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise SystemExit(f"{path}: got an empty log, must have a line for each iteration")
    return [json.loads(line) for line in lines]


def compare(with_key: list[dict[str, float]], without: list[dict[str, float]], warm_up: int) -> str:
    """Lines about two runs over the same iterations.

    Raises:
        SystemExit: the logs are not of the same iterations, or no longer than ``warm_up``.
    """
    if [line["iteration"] for line in with_key] != [line["iteration"] for line in without] or len(without) <= warm_up:
        raise SystemExit(
            f"got {len(with_key)} and {len(without)} iterations, must be the same ones and more than {warm_up}"
        )
    difference = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(with_key, without, strict=True))
    fast, slow = (median(line["seconds"] for line in log[warm_up:]) for log in (with_key, without))
    return (
        f"losses over {len(without)} steps: largest relative difference {difference:.1e}\n"
        f"median step after {warm_up}: {fast:.3f} s with the key, {slow:.3f} s without, {slow / fast:.2f} x as fast"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("with_key", type=Path, help="log of the run with token_pipeline")
    parser.add_argument("without", type=Path, help="log of the run without")
    parser.add_argument("--training", type=Path, help="log of a longer run, whose first and last losses are printed")
    parser.add_argument("--warm-up", type=int, default=2, help="steps to leave out of the times (default: %(default)s)")
    args = parser.parse_args()
    if args.training:
        losses = [line["loss"] for line in read(args.training)]
        tenth = max(1, len(losses) // 10)
        print(f"training, {len(losses)} steps: loss {mean(losses[:tenth]):.2f} -> {mean(losses[-tenth:]):.2f}")
    print(compare(read(args.with_key), read(args.without), args.warm_up))


if __name__ == "__main__":
    main()
