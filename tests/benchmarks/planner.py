"""How long planning takes: the simulator on 100,000 actions, the exact dynamic programme, and a whole choice.

``python -m tests.benchmarks.planner`` prints the best of a few repeats on one core beside what it may take at most, and ends
with status 1 where that is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ds_terapipe.plan import Cuts, Request, best_cut, choose, slice_times
from ds_terapipe.schedule import Action, Op, order, simulate, with_messages
from tests.plan.costs import ExampleCost

STAGES, QUANTUM = 48, 8  # the paper's largest pipeline, and its granularity in tokens


class Timed(NamedTuple):
    """A piece of work: the most seconds that it may take, and the fewest that it took."""

    name: str
    most: float
    seconds: float


def programme(quanta: int) -> None:
    """TeraPipe's dynamic programme over so many quanta, its table of times included."""
    cost = ExampleCost([1.0] * STAGES, attention=2e-8, rough=5e-4)
    cuts = Cuts.of(quanta * QUANTUM, QUANTUM)
    best_cut(slice_times(cost, STAGES, cuts), STAGES - 1)


def simulator(schedule: str) -> int:
    """Simulate a step with messages of some 100,000 actions; how many there were."""
    stages, slices, micro_batches = 16, 16, 66
    grid = with_messages(order(schedule, stages, [slices] * micro_batches))
    seconds = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}

    def compute(action: Action) -> float:
        return seconds[action.op] + 1e-3 * action.unit.slice

    simulate(grid, compute, lambda action: 1e-2)
    return sum(map(len, grid))


def whole_choice() -> None:
    """What ``ds_terapipe plan`` does for 48 stages and 256 quanta."""
    choose(ExampleCost([1.0] * STAGES, attention=2e-8), Request(256 * QUANTUM, STAGES, 2))


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return min(taken)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planner", description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each, the fastest counts (default 3)")
    options = parser.parse_args(arguments)
    actions = {schedule: simulator(schedule) for schedule in ("terapipe", "1f1b")}
    found = [
        Timed("dynamic programme, 256 quanta", 0.3, fastest(lambda: programme(256), options.repeats)),
        Timed("dynamic programme, 1024 quanta", 4.0, fastest(lambda: programme(1024), options.repeats)),
    ]
    for schedule, count in actions.items():
        seconds = fastest(lambda schedule=schedule: simulator(schedule), options.repeats)
        found.append(Timed(f"simulator, {schedule}, {count:,} actions", 2.0 * count / 100_000, seconds))
    print(f"{'':<48}{'seconds':>9}{'at most':>9}{'ratio':>8}")
    for one in found:
        state = "pass" if one.seconds <= one.most else "miss"
        print(f"{one.name:<48}{one.seconds:>9.3f}{one.most:>9.2f}{one.seconds / one.most:>8.2f}  {state}")
    print(f"{'whole choice, 48 stages, 256 quanta':<48}{fastest(whole_choice, 1):>9.3f}")
    return int(any(one.seconds > one.most for one in found))


if __name__ == "__main__":
    sys.exit(main())
