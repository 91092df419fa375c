"""``1f1b``: one-forward-one-backward at the level of slices (Seq1F1B, arXiv 2406.03488).

Micro-batches first in first out, slices of one last in first out. A stage holds at most ``stages - stage + max(slices) - 1``
units, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..actions import Action, Op
from .registry import Schedule, held_by, register
from .segments import placed
from .units import alternate, ascending, descending, passes


def _row(stage: int, stages: int, slices: Sequence[int]) -> list[Action]:
    forward, backward = passes(Op.FORWARD, stage, ascending(slices)), passes(Op.BACKWARD, stage, descending(slices))
    return alternate(forward, backward, _warm_up(stage, stages, slices))


def _warm_up(stage: int, stages: int, slices: Sequence[int]) -> int:
    """Forwards that a stage runs before its first pair of one forward and one backward."""
    # stages - stage - 1 forwards fill the stages below, as in 1F1B over micro-batches. The other max(slices) - 1 are
    # there because a micro-batch goes backward from its last slice, so all its slices must have gone forward first.
    return min(sum(slices), stages - stage - 1 + max(slices) - 1)


_order = partial(placed, _row)
ONE_FORWARD_ONE_BACKWARD = register(Schedule("1f1b", _order, held_by(_order), "slice-level 1F1B"))
