"""The plan and the trials that came near it, run in turn: only steps of the same minutes can be compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ds_terapipe.pipeline.autotune.cutting import Cutting

TURNS = 5


def comparison_steps(cuttings: int) -> int:
    """How many steps a comparison of so many cuttings takes."""
    return 1 + TURNS * cuttings


class Comparison:
    """A planned cutting and its rivals; each gets a step in its turn, ``TURNS`` times.

    A machine is now faster and now slower than it was during the trials; what a trial took then says nothing of what it
    would take now, and the fastest of many trials was a lucky one. The plan's first step does not count: the trials have
    run before, and their buffers are there. Each turn begins with another cutting, or what comes every third step would
    always meet the same one.

    Args:
        planned: the plan.
        rivals: what else may be faster.
    """

    def __init__(self, planned: Cutting, rivals: Sequence[Cutting]) -> None:
        self.cuttings = (planned, *rivals)
        count = len(self.cuttings)
        self._order = [0, *((turn + place) % count for turn in range(TURNS) for place in range(count))]
        self._seconds: list[list[float]] = [[] for _ in self.cuttings]
        self._done = 0

    @property
    def cutting(self) -> Cutting:
        """Whose turn it is."""
        return self.cuttings[self._order[self._done]]

    def took(self, seconds: float) -> bool:
        """Note the seconds of a step for the candidate whose turn it was; return True after the last turn."""
        if self._done:
            self._seconds[self._order[self._done]].append(seconds)
        self._done += 1
        return self._done == len(self._order)

    def fastest(self, cutting: Cutting) -> float:
        """Seconds of the fastest step of one."""
        return min(self._seconds[self.cuttings.index(cutting)])

    def winner(self, worse: float) -> Cutting:
        """The plan, or the rival of which it took more than ``worse`` times the seconds, in the median turn and at its best.

        Either alone is often chance: a step that was disturbed or a lucky one.
        """
        planned, *rivals = self._seconds
        ratios = [
            min(statistics.median(p / r for p, r in zip(planned, rival, strict=True)), min(planned) / min(rival))
            for rival in rivals
        ]
        return self.cuttings[1 + ratios.index(max(ratios))] if max(ratios, default=0.0) > worse else self.cuttings[0]
