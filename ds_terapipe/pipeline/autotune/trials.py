"""Steps of one shape: warm-up, trials, comparison of the plan with the best trials, then training alone.

They are a generator. It yields the `Turn` of the next step and gets the step's times; a plan is in its turns from the end
of the trials on.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Generator, Sequence
from itertools import dropwhile
from typing import NamedTuple

from ds_terapipe.pipeline.autotune.planner import Planner, Shape
from ds_terapipe.pipeline.autotune.slice_plan import SlicePlan
from ds_terapipe.plan.costs.measure import RecordedStep
from ds_terapipe.plan.result import Plan, compact, seconds_text
from ds_terapipe.tracing.chrome import Event

TRIALS = (16, 8, 4, 2, 1)  # numbers of equal slices that are measured
ROUNDS = 2
SHORTEST = 8  # tokens of the shortest slice that is tried
TURNS = 5  # steps of each plan in a comparison
WORSE = 1.01  # factor by which a plan may be slower than a trial in the same steps


class Turn(NamedTuple):
    """The next step of a shape.

    Attributes:
        slices: its slices.
        plan: plan of the shape; None while costs are measured.
        counts: its memory is counted, and decides which trials fit.
    """

    slices: SlicePlan
    plan: Plan | None = None
    counts: bool = False


Steps = Generator[Turn, tuple[Sequence[Event], float], None]
"""Each step that was run is sent in: its events, on rank 0 if it was recorded, and its wall time in seconds."""


def measured_steps(shape: Shape, planner: Planner) -> Steps:
    """Measure equal slices, plan, and go on with the plan; collective wherever it decides."""
    longest, micro_batches = shape
    limit, least = planner.limit, max(SHORTEST, planner.granularity)

    def fitting(trials: Sequence[int]) -> list[int]:
        """Return the trials from the first one on that fits into memory."""
        return [*dropwhile(lambda n: not limit.fits(planner.run.lengths(longest, n), micro_batches), trials)]

    trials = [n for _ in range(ROUNDS) for n in TRIALS if n == 1 or longest // n >= least]
    yield Turn(SlicePlan(trials[0], planner.schedule, timed=True), counts=True)
    limit.count()
    limit.learn(shape, trials[0])
    # if none fits, the one with least memory: planning refuses it and reports its memory
    thriftiest = min(trials, key=lambda n: limit.needed(planner.run.lengths(longest, n), micro_batches))
    left, steps = fitting(trials) or [thriftiest], list[RecordedStep]()
    while left:
        count, *left = left
        events, seconds = yield Turn(SlicePlan(count, planner.schedule, True, recorded=True, times_layers=count == 1))
        limit.learn(shape, count)
        left = fitting(left)
        steps.append(RecordedStep(planner.run.lengths(longest, count), events, seconds))
    planner.learn(steps)
    plan = planner.plan(shape)
    rivals = planner.rivals(plan, steps)
    planner.advise()
    yield from planned_steps(plan, planner, rivals)


def planned_steps(plan: Plan, planner: Planner, rivals: Sequence[Plan] = ()) -> Steps:
    """Run a plan: compare it with its prediction and its rivals first, each in its turn, and go on with the winner.

    A machine's speed changes with time, so the times of earlier trials are not comparable, and the fastest of many
    trials was a lucky one. The plan's first step does not count: the trials have run before, and their buffers exist.
    Each turn begins with another plan, so that an event in every third step does not always meet the same one.
    """
    plans = (plan, *rivals)
    taken: list[list[float]] = [[] for _ in plans]
    yield Turn(slice_plan(plan)._replace(timed=True), plan)
    for turn in range(TURNS):
        for place in range(len(plans)):
            index = (turn + place) % len(plans)
            _, seconds = yield Turn(slice_plan(plans[index])._replace(timed=True), plan)
            taken[index].append(seconds)

    def decide() -> Plan:
        fastest, index = min(taken[0]), winner(taken, WORSE)
        error = f" ({fastest / plan.step_s - 1:+.1%})" if plan.step_s else ""
        planner.say(f"plan: step {seconds_text(plan.step_s)} predicted, {seconds_text(fastest)} taken{error}")
        return dataclasses.replace(plans[index], step_s=min(taken[index]), options=plan.options) if index else plan

    settled: Plan = planner.agree(decide)
    if slice_plan(settled) != slice_plan(plan):
        what = "uncut" if len(settled.slices) == 1 else f"{compact(settled.slices)} tokens in {settled.schedule}"
        planner.say(f"plan: {what}, a step took {seconds_text(settled.step_s)}: used instead")
    trained = Turn(slice_plan(settled), settled)
    while True:
        yield trained


def winner(taken: Sequence[Sequence[float]], worse: float) -> int:
    """Return 0 for the plan, or the number of a rival that it exceeds by the factor ``worse``.

    It must do so in the median turn and at its best. Either alone is often chance: a disturbed step or a lucky one.

    Args:
        taken: seconds of each turn, of the plan and then of its rivals.
        worse: the factor.
    """
    planned, *rivals = taken
    ratios = [
        min(statistics.median(p / r for p, r in zip(planned, rival, strict=True)), min(planned) / min(rival))
        for rival in rivals
    ]
    return 1 + ratios.index(max(ratios)) if max(ratios, default=0.0) > worse else 0


def slice_plan(plan: Plan) -> SlicePlan:
    """Return the slices and the schedule of a plan."""
    return SlicePlan(plan.slices, plan.runs)
