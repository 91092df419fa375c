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

from ..actions import Action, Op, Unit
from ..placement import Placement
from .one_forward_one_backward import live, row
from .registry import Schedule, register
from .segments import bounded, placed
from .units import ascending, descending


def _order(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    if not _goes_around(placement, slices):
        return placed(row, placement, slices)
    rows = [_row(place, placement, slices) for place in range(placement.places)]
    return [
        [action for action in of_place if action.op is Op.FORWARD or placement.goes_backward(action.stage)]
        for of_place in rows
    ]


def _bound(placement: Placement, slices: Sequence[int]) -> list[int]:
    if not _goes_around(placement, slices):
        return bounded(live, placement, slices)
    most = []
    for place in range(placement.places):
        trained = sum(placement.goes_backward(stage) for stage in placement.stages_on(place))
        most.append(min(_warm_up(place, placement, slices) + 1, trained * sum(slices)))
    return most


def _goes_around(placement: Placement, slices: Sequence[int]) -> bool:
    """Whether a unit goes around the places once for each chunk, and the units are whole blocks."""
    places = placement.places
    in_turn = all(stage.place == number % places for number, stage in enumerate(placement.stages))
    return in_turn and len(placement.stages) % places == 0 and len(ascending(slices)) % places == 0


def _blocks(op: Op, stages: Sequence[int], units: Sequence[Unit], places: int) -> list[Action]:
    """Blocks of so many units as there are places, one stage after the other."""
    starts = range(0, len(units), places)
    return [Action(op, stage, unit) for start in starts for stage in stages for unit in units[start : start + places]]


def _both(place: int, placement: Placement, slices: Sequence[int]) -> tuple[list[Action], list[Action]]:
    stages, places = placement.stages_on(place), placement.places
    forward = _blocks(Op.FORWARD, stages, ascending(slices), places)
    return forward, _blocks(Op.BACKWARD, stages[::-1], descending(slices), places)


def _warm_up(place: int, placement: Placement, slices: Sequence[int]) -> int:
    """Forwards of a place before its first pair of one forward and one backward."""
    forward, backward = _both(place, placement, slices)
    at = {action[1:]: index for index, action in enumerate(forward)}
    own = max(at[action[1:]] - index for index, action in enumerate(backward))
    # two steps for each place below: with one, a place would wait for a message while its own is waited for
    return min(len(forward), own + 2 * (placement.places - place - 1))


def _row(place: int, placement: Placement, slices: Sequence[int]) -> list[Action]:
    forward, backward = _both(place, placement, slices)
    warm_up = _warm_up(place, placement, slices)
    pairs = len(forward) - warm_up
    steady = [action for pair in zip(forward[warm_up:], backward[:pairs], strict=True) for action in pair]
    return forward[:warm_up] + steady + backward[pairs:]


INTERLEAVED = register(Schedule("interleaved", _order, _bound))
