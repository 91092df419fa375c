"""Phases of the steps of one shape: warm-up, trials, comparison of the plan with the best trials, then training alone.

A phase says how its next step is cut, is told what the step took, and says which phase follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from ds_terapipe.pipeline.autotune.comparison import Comparison
from ds_terapipe.pipeline.autotune.cutting import Cutting
from ds_terapipe.pipeline.autotune.planner import Planner, Shape
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.measure import RecordedStep
from ds_terapipe.plan.result import Plan, compact, seconds_text
from ds_terapipe.tracing.chrome import Event

TRIALS = (16, 8, 4, 2, 1)  # numbers of equal slices that are measured
ROUNDS = 2
SHORTEST = 8  # tokens of a slice that is tried
WORSE = 1.01  # a plan that takes so much longer than a trial in the same steps is given up for it


class Phase(Protocol):
    """Of the steps of one shape."""

    @property
    def plan(self) -> Plan | None:
        """Plan by which such steps are cut; None while costs are measured."""

    @property
    def wants_events(self) -> bool:
        """Whether its step is to be recorded."""

    @property
    def wants_layers(self) -> bool:
        """Whether single layers are to be timed in its step."""

    def begin(self) -> Cutting:
        """How the step that begins is cut."""

    def took(self, events: Sequence[Event], seconds: float) -> Phase:
        """The step is over: its events, on rank 0, and its wall time. What follows; collective where that decides something."""


class WarmUp:
    """One step, in which buffers are made and the model is inspected; what it takes says which trials there is memory for.

    Args:
        shape: of the steps.
        planner: that learns what the trials cost.
    """

    plan = None
    wants_events = wants_layers = False

    def __init__(self, shape: Shape, planner: Planner) -> None:
        self._shape, self._planner = shape, planner
        least = max(SHORTEST, planner.granularity)
        self._trials = [n for _ in range(ROUNDS) for n in TRIALS if n == 1 or shape[0] // n >= least]

    def begin(self) -> Cutting:
        """Run the first trial."""
        self._planner.budget.begin()
        self._planner.budget.note_peak()
        return Cutting(self._trials[0], self._planner.schedule)

    def took(self, events: Sequence[Event], seconds: float) -> Phase:
        """The trials follow."""
        budget = self._planner.budget
        budget.end()
        budget.learn(self._shape, self._trials[0])
        longest, micro_batches = self._shape
        fitting = _behind_what_does_not_fit(self._trials, self._shape, self._planner)
        if not fitting:  # the thriftiest: planning refuses it and says what it takes
            fitting = [min(self._trials, key=lambda n: budget.needed(slice_lengths(longest, n), micro_batches))]
        return Trials(self._shape, fitting, self._planner)


class Trials:
    """Steps that are cut in one way and another, and recorded; behind the last one a plan is made of them.

    Args:
        shape: of the steps.
        trials: numbers of equal slices, one for each step.
        planner: that learns what they cost.
    """

    plan = None
    wants_events = True

    def __init__(self, shape: Shape, trials: Sequence[int], planner: Planner) -> None:
        self._shape, self._trials, self._planner = shape, list(trials), planner
        self._steps: list[RecordedStep] = []

    @property
    def wants_layers(self) -> bool:
        """In an uncut trial, if there is memory for one."""
        return self._trials[0] == 1

    def begin(self) -> Cutting:
        """The next trial."""
        self._planner.budget.note_peak()
        return Cutting(self._trials[0], self._planner.schedule)

    def took(self, events: Sequence[Event], seconds: float) -> Phase:
        """Another trial, or the plan."""
        count, planner = self._trials.pop(0), self._planner
        planner.budget.learn(self._shape, count)
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
    """Steps that show whether a plan takes what it predicts, and whether one of its rivals is faster.

    Args:
        plan: the one that is to be used.
        planner: that has made it.
        rivals: what else may be faster.
    """

    wants_events = wants_layers = False

    def __init__(self, plan: Plan, planner: Planner, rivals: Sequence[Plan] = ()) -> None:
        self.plan, self._planner, self._rivals = plan, planner, tuple(rivals)
        self._comparison = Comparison(_cutting(plan), [_cutting(rival) for rival in rivals])

    def begin(self) -> Cutting:
        """Whose turn it is."""
        return self._comparison.cutting

    def took(self, events: Sequence[Event], seconds: float) -> Phase:
        """The next turn, or the one that has won."""
        if not self._comparison.took(seconds):
            return self
        settled: Plan = self._planner.agree(self._decide)
        if _cutting(settled) != _cutting(self.plan):
            whole = len(settled.slices) == 1
            what = "uncut" if whole else f"{compact(settled.slices)} tokens in {settled.schedule}"
            self._planner.say(f"plan: {what}, a step took {seconds_text(settled.step_s)}: used instead")
        return Settled(settled)

    def _decide(self) -> Plan:
        plan, comparison = self.plan, self._comparison
        taken, winner = comparison.fastest(_cutting(plan)), comparison.winner(WORSE)
        error = f" ({taken / plan.step_s - 1:+.1%})" if plan.step_s else ""
        self._planner.say(f"plan: step {seconds_text(plan.step_s)} predicted, {seconds_text(taken)} taken{error}")
        faster = [rival for rival in self._rivals if _cutting(rival) == winner]
        if not faster:
            return plan
        return dataclasses.replace(faster[0], step_s=comparison.fastest(winner), options=plan.options)


class Settled:
    """All further steps run by ``plan``."""

    wants_events = wants_layers = False

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def begin(self) -> Cutting:
        """Run the plan."""
        return _cutting(self.plan)

    def took(self, events: Sequence[Event], seconds: float) -> Phase:
        """Nothing changes any more."""
        return self


def _cutting(plan: Plan) -> Cutting:
    return Cutting(plan.slices, plan.schedule)


def _behind_what_does_not_fit(trials: Sequence[int], shape: Shape, planner: Planner) -> list[int]:
    """The trials from the first one on that takes no more memory than there is."""
    left, (longest, micro_batches) = list(trials), shape
    while left and not planner.budget.fits(slice_lengths(longest, left[0]), micro_batches):
        left.pop(0)
    return left
