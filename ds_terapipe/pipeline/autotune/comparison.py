"""Comparison of the plan with trials that came near it, run in turn: only steps close in time are comparable."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ds_terapipe.pipeline.autotune.slice_plan import SlicePlan

TURNS = 5


def comparison_steps(plans: int) -> int:
    """Return the number of steps of a comparison of so many slice plans."""
    return 1 + TURNS * plans


class Comparison:
    """A planned slice plan and its rivals; each gets a step in its turn, ``TURNS`` times.

    A machine's speed changes with time, so the times of earlier trials are not comparable, and the fastest of many
    trials was a lucky one. The plan's first step does not count: the trials have run before, and their buffers exist.
    Each turn begins with another slice plan, so that an event in every third step does not always meet the same one.

    Args:
        planned: the planned slice plan.
        rivals: other slice plans that may be faster.
    """

    def __init__(self, planned: SlicePlan, rivals: Sequence[SlicePlan]) -> None:
        self.plans = (planned, *rivals)
        count = len(self.plans)
        self._order = [0, *((turn + place) % count for turn in range(TURNS) for place in range(count))]
        self._seconds: list[list[float]] = [[] for _ in self.plans]
        self._done = 0

    @property
    def plan(self) -> SlicePlan:
        """Slice plan of the next step."""
        return self.plans[self._order[self._done]]

    def record_step(self, seconds: float) -> bool:
        """Note the seconds of a step for the candidate whose turn it was; return True after the last turn."""
        if self._done:
            self._seconds[self._order[self._done]].append(seconds)
        self._done += 1
        return self._done == len(self._order)

    def fastest(self, plan: SlicePlan) -> float:
        """Return the seconds of a slice plan's fastest step."""
        return min(self._seconds[self.plans.index(plan)])

    def winner(self, worse: float) -> SlicePlan:
        """Return the plan, or a rival that it exceeds by the factor ``worse``, in the median turn and at its best.

        Either alone is often chance: a disturbed step or a lucky one.
        """
        planned, *rivals = self._seconds
        ratios = [
            min(statistics.median(p / r for p, r in zip(planned, rival, strict=True)), min(planned) / min(rival))
            for rival in rivals
        ]
        return self.plans[1 + ratios.index(max(ratios))] if max(ratios, default=0.0) > worse else self.plans[0]
