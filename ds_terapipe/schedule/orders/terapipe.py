"""``terapipe``: every unit forward, then every unit backward, in exact reverse.

TeraPipe (Li et al., ICML 2021, arXiv 2102.07988). A stage holds all units of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..actions import Action, Op
from .registry import Schedule, held_by, register
from .segments import placed
from .units import ascending, passes


def _row(stage: int, stages: int, slices: Sequence[int]) -> list[Action]:
    forward = ascending(slices)
    return [*passes(Op.FORWARD, stage, forward), *passes(Op.BACKWARD, stage, forward[::-1])]


_order = partial(placed, _row)
TERAPIPE = register(Schedule("terapipe", _order, held_by(_order), "TeraPipe, flush"))
