"""``zero_bubble``: 1F1B of slices whose weight gradients fill the waits (``schedule/fill.py``).

Forward and backward passes are those of ``1f1b``; where places have several stages in turn, those of ``rounds.py``. Without
separate weight gradients it is nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action
from ..fill import fill
from ..placement import Placement
from . import rounds
from .one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from .registry import Schedule, held_by, register


def _order(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    passes = rounds.order if rounds.fits(placement) else ONE_FORWARD_ONE_BACKWARD.order
    return fill(passes(placement, slices), placement)


ZERO_BUBBLE = register(Schedule("zero_bubble", _order, held_by(_order), "slice-level 1F1B, weight gradients in waits"))
