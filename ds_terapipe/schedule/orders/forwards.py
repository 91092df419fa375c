"""``forward_only``: an evaluation. Every unit forward, micro-batches and slices ascending; nothing is held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..actions import Action, Op
from .registry import Schedule, register
from .segments import placed
from .units import ascending, passes


def _row(stage: int, stages: int, slices: Sequence[int]) -> list[Action]:
    return passes(Op.FORWARD, stage, ascending(slices))


FORWARD_ONLY = register(
    Schedule("forward_only", partial(placed, _row), lambda placement, slices: [0] * placement.places)
)
