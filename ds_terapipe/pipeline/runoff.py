"""The plan and the trials that came near it, run in turn: only steps of the same minutes can be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

TURNS = 3


class Cutting(NamedTuple):
    """How the micro-batches of a step are cut, and the schedule that they run in."""

    slices: int | tuple[int, ...]
    schedule: str


class Runoff:
    """Each of some cuttings gets a step in its turn, ``TURNS`` times.

    A machine is now faster and now slower than it was during the trials; what a trial took then says nothing of what it
    would take now, and the fastest of many trials was a lucky one.

    Args:
        shape: sequence length and micro-batches of the steps that count.
        cuttings: what is compared, at least one.
    """

    def __init__(self, shape: tuple[int, int], cuttings: Sequence[Cutting]) -> None:
        self.shape, self.cuttings = shape, tuple(cuttings)
        self._seconds: list[float] = []

    @property
    def cutting(self) -> Cutting:
        """Whose turn it is."""
        return self.cuttings[len(self._seconds) % len(self.cuttings)]

    def took(self, seconds: float) -> bool:
        """What the step took, of the one whose turn it was; True after the last."""
        self._seconds.append(seconds)
        return len(self._seconds) == TURNS * len(self.cuttings)

    def fastest(self) -> list[float]:
        """Seconds of the fastest step of each; infinite where there was none."""
        count = len(self.cuttings)
        return [min(self._seconds[i::count], default=math.inf) for i in range(count)]
