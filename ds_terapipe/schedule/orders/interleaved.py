"""``interleaved``: 1F1B over several chunks of the model on each place.

With stage s on place s mod K a unit goes around all K places once for each chunk. Filling and draining the pipeline then
takes steps of one chunk instead of one whole stage, for more messages and more live activations. The order is that of
Narayanan et al. 2021 (arXiv 2104.04473, section 2.2), with slices for micro-batches: blocks of K units, a chunk at a
time. So the first place takes what the last one sends when it comes. Backward blocks have the slices of a micro-batch
in descending order, and the warm-up goes on to its last slice.

On another placement, and where the units are no multiple of K, the order is that of ``1f1b``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action, Unit
from ..placement import Placement
from .one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from .registry import Schedule, held_by, register
from .rounds import around, in_turn
from .units import ascending, descending


def _order(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    places, forward, backward = placement.places, ascending(slices), descending(slices)
    if not in_turn(placement) or len(forward) % places:
        return ONE_FORWARD_ONE_BACKWARD.order(placement, slices)

    def blocks(units: Sequence[Unit]) -> list[Sequence[Unit]]:
        return [units[start : start + places] for start in range(0, len(units), places)]

    # two units for each place below: with one, a place would wait for a message while its own is waited for
    return around(placement, blocks(forward), blocks(backward), ahead=2)


INTERLEAVED = register(Schedule("interleaved", _order, held_by(_order)))
