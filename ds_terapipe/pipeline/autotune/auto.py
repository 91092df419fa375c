"""``"slices": "auto"``: the first steps of each shape determine the slice plan of later ones, see trials.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ds_terapipe.pipeline.autotune.planner import Planner, Shape
from ds_terapipe.pipeline.autotune.run_info import given_plan, mismatch
from ds_terapipe.pipeline.autotune.slice_plan import SlicePlan
from ds_terapipe.pipeline.autotune.trials import SHORTEST, TRIALS, Steps, Turn, measured_steps, planned_steps
from ds_terapipe.plan.result import Plan, compact
from ds_terapipe.tracing.chrome import Event

PATIENCE = 20  # steps of other lengths until a measurement is given up


class AutoSlices:
    """Measures in the first steps, plans, and compares the plan with the best trials in the steps after it.

    A sequence longer than the measurements starts again. Other numbers of micro-batches, or shorter sequences, are
    planned from the known costs.

    Args:
        planner: makes the plans.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._say, config = planner, planner.say, planner.config
        self._steps: dict[Shape, Steps] = {}
        self._turns: dict[Shape, Turn] = {}  # the next one of each
        self._shape: Shape | None = None  # of the step that was cut last, None if it was no turn
        self._missed = 0  # steps since the last measured one
        self._given: Plan | None = None
        if config.plan_path is not None:
            self._given = plan = planner.agree(lambda: given_plan(config, planner.run))
            self._say(f"plan: {compact(plan.slices)} tokens, {plan.schedule}, from {config.plan_path}")
            self._adopt(plan)

    def plan(self, lengths: Sequence[int], everywhere: Sequence[int]) -> SlicePlan:
        """Return the slice plan for these lengths; ``everywhere``: of all pipelines. Collective if it plans."""
        longest, self._shape = max(everywhere), None
        shape, alike = (longest, len(lengths)), min(everywhere) == longest
        turn = self._turn_of(shape, alike)
        if turn is None:
            return self._unmeasured(everywhere)
        if not alike:  # not comparable with other steps
            return self._unmeasured(everywhere) if turn.plan is None else _scaled(turn.plan, everywhere)
        if turn.plan is None:
            self._missed = 0
            self._planner.limit.meter.watch(turn.counts)
        self._shape = shape
        return turn.slices

    def now(self, everywhere: Sequence[int]) -> SlicePlan:
        """Return the training's slice plan for an evaluation, which is neither measured nor planned for."""
        plan = next((plan for plan in self._plans() if plan.seq_length == max(everywhere)), None)
        return self._unmeasured(everywhere) if plan is None else _scaled(plan, everywhere)

    def _turn_of(self, shape: Shape, alike: bool) -> Turn | None:
        """Return the turn of steps of this shape, the first one if they are new; None while another shape is measured.

        If lengths change from step to step, the shape under measurement is measured whenever it comes; steps of others
        just run. After ``PATIENCE`` steps of other shapes its measurement is given up.
        """
        if shape in self._turns:
            return self._turns[shape]
        if self._planner.can_plan(shape):
            self._say_why(shape)
            return self._adopt(self._planner.plan(shape))
        if not alike:
            return None
        self._missed += 1
        measured = next((other for other, turn in self._turns.items() if turn.plan is None), None)
        if measured is not None:
            if self._missed <= PATIENCE:
                return None
            del self._turns[measured], self._steps[measured]
        self._say_why(shape)
        cost = self._planner.cost
        if cost is not None:
            known = f"slices of {cost.min_length} to {cost.max_slice} tokens, up to {cost.max_length}"
            self._say(f"plan: measured were {known}, not sequences of {shape[0]}: measured again")
        return self._begin(shape, measured_steps(shape, self._planner))

    def _adopt(self, plan: Plan) -> Turn:
        """Use a plan, and compare the next steps with its prediction."""
        return self._begin((plan.seq_length, plan.micro_batches), planned_steps(plan, self._planner))

    def _begin(self, shape: Shape, steps: Steps) -> Turn:
        self._steps[shape], self._turns[shape] = steps, next(steps)
        return self._turns[shape]

    def _say_why(self, shape: Shape) -> None:
        """Log that the plan of ``plan_path`` is not used, if it is for other sequences."""
        given, (length, micro_batches) = self._given, shape
        if given is not None and (given.seq_length, given.micro_batches) != shape:
            theirs = f"{given.micro_batches} micro-batches of {given.seq_length} tokens"
            self._say(
                f"plan: {self._planner.config.plan_path} is for {theirs}, not for these {micro_batches} of {length}"
            )

    def _unmeasured(self, everywhere: Sequence[int]) -> SlicePlan:
        """Return a slice plan for steps of unknown cost."""
        least = max(SHORTEST, self._planner.run.multiple)
        return SlicePlan(min(TRIALS[1], max(min(everywhere) // least, 1)), self._planner.schedule)

    def record_step(self, events: Sequence[Event], seconds: float) -> None:
        """Note the end of the step: its events, on rank 0, and its wall time; collective if that decides anything."""
        if self._shape is not None:
            self._turns[self._shape] = self._steps[self._shape].send((events, seconds))

    def _plans(self) -> list[Plan]:
        return [turn.plan for turn in self._turns.values() if turn.plan is not None]

    def state(self) -> dict[str, Any]:
        """Return the plans, for a checkpoint."""
        return {"plans": [plan.to_dict() for plan in self._plans()]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Load the plans of a checkpoint that were made for a run like this one; an explicit plan takes precedence."""
        for data in (state or {}).get("plans", ()):
            plan = Plan.from_dict(data, "checkpoint")
            # a run may change its number of micro-batches, and has a plan for each
            alike = dataclasses.replace(self._planner.run, micro_batches=plan.micro_batches)
            other = mismatch(plan, alike, self._planner.config.schedule, self._planner.config.memory_gb)
            what = f"{compact(plan.slices)} tokens, {plan.schedule}, from the checkpoint"
            there = self._turns.get((plan.seq_length, plan.micro_batches))
            if other is not None:
                self._say(f"plan: {what}, is for {other.theirs} and not for {other.ours}: not used")
            elif there is not None and there.plan is not None:
                self._say(f"plan: {what}, is not used: there is another one")
            else:
                self._adopt(plan)
                self._say(f"plan: {what}, for {plan.micro_batches} micro-batches of {plan.seq_length} tokens")


def _scaled(plan: Plan, everywhere: Sequence[int]) -> SlicePlan:
    """Scale a plan to sequences that are not all as long as its own."""
    return SlicePlan(plan.slices if min(everywhere) == plan.seq_length else len(plan.slices), plan.runs)
