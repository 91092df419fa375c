"""How long planning takes: the exact dynamic programme, and the simulator on 100,000 actions.

``python -m tests.benchmarks.planner`` prints seconds, and the ratio to a loop of a million additions in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.benchmarks import measure

STAGES, QUANTUM = 48, 8  # the paper's largest pipeline, and its granularity in tokens
LOOP, QUANTA, SCHEDULES = "a million additions in Python", (256, 1024), ("terapipe", "1f1b")


def programme(quanta: int) -> None:
    """TeraPipe's dynamic programme over so many quanta, its table of times included."""
    from ds_terapipe.plan.slices import Cuts, best_cut, slice_times
    from tests.plan.costs import ExampleCost

    cost, cuts = ExampleCost([1.0] * STAGES, attention=2e-8, rough=5e-4), Cuts.of(quanta * QUANTUM, QUANTUM)
    best_cut(slice_times(cost, STAGES, cuts), STAGES - 1)


def simulator(schedule: str) -> Callable[[], object]:
    """Function that simulates a step with messages of some 100,000 actions."""
    from ds_terapipe.schedule import Action, Op, order, simulate, with_messages

    grid = with_messages(order(schedule, 16, [16] * 66))

    def compute(action: Action) -> float:
        return (1.0 if action.op is Op.FORWARD else 2.0) + 1e-3 * action.unit.slice

    return lambda: simulate(grid, compute, lambda action: 1e-2)


def make() -> Callable[[str], object]:
    """Function that does the work of a column."""
    work = {LOOP: lambda: sum(number for number in range(1_000_000))}
    work |= {schedule: simulator(schedule) for schedule in SCHEDULES}
    work |= {f"{quanta} quanta": partial(programme, quanta) for quanta in QUANTA}
    return lambda column: work[column]()


def main() -> None:
    options = measure.parser("planner", __doc__, rounds=3).parse_args()
    names = [LOOP, *(f"{quanta} quanta" for quanta in QUANTA), *SCHEDULES]
    repeats = dict.fromkeys(names, 1 if options.quick else 3)
    result = measure.on_ranks(measure.calls, make, repeats, measure.settings_of(options))
    title = "dynamic programme over quanta, simulator of 100,000 actions"
    measure.Report(options).add("planning", result, result.table(title, LOOP))


if __name__ == "__main__":
    main()
