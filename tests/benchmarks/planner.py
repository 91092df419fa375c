"""How long planning takes: the simulator on 100,000 actions, the exact dynamic programme, and a whole choice.

``python -m tests.benchmarks.planner`` prints seconds, and the ratio to a loop of a million additions in plain Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from tests.benchmarks import measure

STAGES, QUANTUM = 48, 8  # the paper's largest pipeline, and its granularity in tokens
LOOP, CHOICE = "a million additions in Python", "whole choice, 48 stages, 256 quanta"
QUANTA, SCHEDULES = (256, 1024), ("terapipe", "1f1b")


def addition() -> None:
    total = 0
    for number in range(1_000_000):
        total += number


def programme(quanta: int) -> None:
    """TeraPipe's dynamic programme over so many quanta, its table of times included."""
    from ds_terapipe.plan import Cuts, best_cut, slice_times
    from tests.plan.costs import ExampleCost

    cost, cuts = ExampleCost([1.0] * STAGES, attention=2e-8, rough=5e-4), Cuts.of(quanta * QUANTUM, QUANTUM)
    best_cut(slice_times(cost, STAGES, cuts), STAGES - 1)


def simulator(schedule: str) -> Callable[[], object]:
    """Function that simulates a step with messages of some 100,000 actions."""
    from ds_terapipe.schedule import Action, Op, order, simulate, with_messages

    grid = with_messages(order(schedule, 16, [16] * 66))
    assert abs(sum(map(len, grid)) - 100_000) < 5_000

    def compute(action: Action) -> float:
        return (1.0 if action.op is Op.FORWARD else 2.0) + 1e-3 * action.unit.slice

    return lambda: simulate(grid, compute, lambda action: 1e-2)


def whole_choice() -> None:
    """Function that plans 48 stages and 256 quanta, as ``ds_terapipe plan`` does."""
    from ds_terapipe.plan import Request, choose
    from tests.plan.costs import ExampleCost

    choose(ExampleCost([1.0] * STAGES, attention=2e-8), Request(256 * QUANTUM, STAGES, 2))


def make() -> Callable[[str], object]:
    """Function that does the work of a column."""
    work = {LOOP: addition, CHOICE: whole_choice, **{schedule: simulator(schedule) for schedule in SCHEDULES}}
    work |= {f"{quanta} quanta": partial(programme, quanta) for quanta in QUANTA}
    return lambda column: work[column]()


def main(arguments: Sequence[str] | None = None) -> int:
    options = measure.parser("planner", __doc__, rounds=3).parse_args(arguments)
    names = [LOOP, *(f"{quanta} quanta" for quanta in QUANTA), *SCHEDULES, *([] if options.quick else [CHOICE])]
    repeats = {name: 1 if options.quick or name == CHOICE else 3 for name in names}
    (result,) = measure.on_ranks(measure.calls, make, repeats, measure.settings_of(options))
    print("\n".join(result.table("dynamic programme over quanta, simulator of 100,000 actions", LOOP)))
    measure.write_json(options.json, {"planning": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
