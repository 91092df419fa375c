"""``zero_bubble``: 1F1B of slices whose weight gradients fill the waits (``schedule/fill.py``).

Forward and backward passes are those of ``1f1b``. Where no weight gradients are made apart it is nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action
from ..fill import fill
from ..placement import Placement
from .one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from .registry import Schedule, register


def _order(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    return fill(ONE_FORWARD_ONE_BACKWARD.order(placement, slices), placement)


ZERO_BUBBLE = register(
    Schedule("zero_bubble", _order, ONE_FORWARD_ONE_BACKWARD.bound, "slice-level 1F1B, weight gradients in waits")
)
