"""Phases of the steps of one shape: warm-up, trials, comparison of the plan with the best trials, then training alone.

A phase returns the slice plan of its next step, gets the step's times, and returns the phase that follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from ds_terapipe.pipeline.autotune.comparison import Comparison
from ds_terapipe.pipeline.autotune.planner import Planner, Shape
from ds_terapipe.pipeline.autotune.slice_plan import SlicePlan
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.measure import RecordedStep
from ds_terapipe.plan.result import Plan, compact, seconds_text
from ds_terapipe.tracing.chrome import Event

TRIALS = (16, 8, 4, 2, 1)  # numbers of equal slices that are measured
ROUNDS = 2
SHORTEST = 8  # tokens of the shortest slice that is tried
WORSE = 1.01  # factor by which a plan may be slower than a trial in the same steps


class Phase(Protocol):
    """Phase of the steps of one shape."""

    @property
    def plan(self) -> Plan | None:
        """Plan by which such steps are cut; None while costs are measured."""

    @property
    def wants_events(self) -> bool:
        """Whether to record its next step."""

    @property
    def wants_layers(self) -> bool:
        """Whether to time single layers in its next step."""

    def begin(self) -> SlicePlan:
        """Return the slice plan of the next step."""

    def record_step(self, events: Sequence[Event], seconds: float) -> Phase:
        """Note the step's events, on rank 0, and its wall time; return the next phase. Collective if it decides."""


class WarmUp:
    """One step, in which buffers are made and the model is inspected; its memory decides which trials fit.

    Args:
        shape: shape of the steps.
        planner: planner that learns the costs of the trials.
    """

    plan = None
    wants_events = wants_layers = False

    def __init__(self, shape: Shape, planner: Planner) -> None:
        self._shape, self._planner = shape, planner
        least = max(SHORTEST, planner.granularity)
        self._trials = [n for _ in range(ROUNDS) for n in TRIALS if n == 1 or shape[0] // n >= least]

    def begin(self) -> SlicePlan:
        """Run the first trial."""
        self._planner.limit.begin()
        self._planner.limit.note_peak()
        return SlicePlan(self._trials[0], self._planner.schedule)

    def record_step(self, events: Sequence[Event], seconds: float) -> Phase:
        """Go on with the trials."""
        limit = self._planner.limit
        limit.end()
        limit.learn(self._shape, self._trials[0])
        longest, micro_batches = self._shape
        fitting = _behind_what_does_not_fit(self._trials, self._shape, self._planner)
        if not fitting:  # the one with least memory: planning refuses it and reports its memory
            fitting = [min(self._trials, key=lambda n: limit.needed(slice_lengths(longest, n), micro_batches))]
        return Trials(self._shape, fitting, self._planner)


class Trials:
    """Recorded steps of different slice plans, from which a plan is made at the end.

    Args:
        shape: shape of the steps.
        trials: numbers of equal slices, one for each step.
        planner: planner that learns their costs.
    """

    plan = None
    wants_events = True

    def __init__(self, shape: Shape, trials: Sequence[int], planner: Planner) -> None:
        self._shape, self._trials, self._planner = shape, list(trials), planner
        self._steps: list[RecordedStep] = []

    @property
    def wants_layers(self) -> bool:
        """Whether the trial is uncut."""
        return self._trials[0] == 1

    def begin(self) -> SlicePlan:
        """Run the next trial."""
        self._planner.limit.note_peak()
        return SlicePlan(self._trials[0], self._planner.schedule)

    def record_step(self, events: Sequence[Event], seconds: float) -> Phase:
        """Go on with another trial, or the plan."""
        count, planner = self._trials.pop(0), self._planner
        planner.limit.learn(self._shape, count)
        self._trials = _behind_what_does_not_fit(self._trials, self._shape, planner)
        self._steps.append(RecordedStep(slice_lengths(self._shape[0], count), events, seconds))
        if self._trials:
            return self
        planner.learn(self._steps)
        plan = planner.plan(self._shape)
        compared = Compared(plan, planner, planner.rivals(plan, self._steps))
        planner.advise()
        return compared


class Compared:
    """Steps that compare a plan with its prediction and with its rivals.

    Args:
        plan: the plan to use.
        planner: planner that has made it.
        rivals: other plans that may be faster.
    """

    wants_events = wants_layers = False

    def __init__(self, plan: Plan, planner: Planner, rivals: Sequence[Plan] = ()) -> None:
        self.plan, self._planner, self._rivals = plan, planner, tuple(rivals)
        self._comparison = Comparison(_slice_plan(plan), [_slice_plan(rival) for rival in rivals])

    def begin(self) -> SlicePlan:
        """Run the slice plan whose turn it is."""
        return self._comparison.plan

    def record_step(self, events: Sequence[Event], seconds: float) -> Phase:
        """Go on with the next turn, or the winner."""
        if not self._comparison.record_step(seconds):
            return self
        settled: Plan = self._planner.agree(self._decide)
        if _slice_plan(settled) != _slice_plan(self.plan):
            whole = len(settled.slices) == 1
            what = "uncut" if whole else f"{compact(settled.slices)} tokens in {settled.schedule}"
            self._planner.say(f"plan: {what}, a step took {seconds_text(settled.step_s)}: used instead")
        return Settled(settled)

    def _decide(self) -> Plan:
        plan, comparison = self.plan, self._comparison
        taken, winner = comparison.fastest(_slice_plan(plan)), comparison.winner(WORSE)
        error = f" ({taken / plan.step_s - 1:+.1%})" if plan.step_s else ""
        self._planner.say(f"plan: step {seconds_text(plan.step_s)} predicted, {seconds_text(taken)} taken{error}")
        faster = [rival for rival in self._rivals if _slice_plan(rival) == winner]
        if not faster:
            return plan
        return dataclasses.replace(faster[0], step_s=comparison.fastest(winner), options=plan.options)


class Settled:
    """All further steps, run by ``plan``."""

    wants_events = wants_layers = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def begin(self) -> SlicePlan:
        """Run the plan."""
        return _slice_plan(self.plan)

    def record_step(self, events: Sequence[Event], seconds: float) -> Phase:
        """Stay in this phase."""
        return self


def _slice_plan(plan: Plan) -> SlicePlan:
    return SlicePlan(plan.slices, plan.schedule)


def _behind_what_does_not_fit(trials: Sequence[int], shape: Shape, planner: Planner) -> list[int]:
    """Return the trials from the first one on that fits into memory."""
    left, (longest, micro_batches) = list(trials), shape
    while left and not planner.limit.fits(slice_lengths(longest, left[0]), micro_batches):
        left.pop(0)
    return left
