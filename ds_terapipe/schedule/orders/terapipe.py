"""``terapipe``: every unit forward, then every unit backward, in exact reverse.

TeraPipe (Li et al., ICML 2021, arXiv 2102.07988). A stage holds all units of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..actions import Action
from .registry import Schedule, register
from .segments import bounded, placed
from .units import alternate, ascending


def _row(stage: int, stages: int, slices: Sequence[int]) -> list[Action]:
    forward = ascending(slices)
    return alternate(stage, forward, forward[::-1], len(forward))


def _live(stage: int, stages: int, slices: Sequence[int]) -> int:
    return len(ascending(slices))


TERAPIPE = register(Schedule("terapipe", partial(placed, _row), partial(bounded, _live), "TeraPipe, flush"))
