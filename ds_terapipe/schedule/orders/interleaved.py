"""``interleaved``: 1F1B of unsliced micro-batches over several chunks of the model on each place.

With stage s on place s mod K a micro-batch goes around all K places once for each chunk. Filling and draining the pipeline then
takes steps of one chunk instead of one whole stage, for more messages and more live activations. The order is that of Narayanan
et al. 2021 (arXiv 2104.04473, section 2.2), as Megatron runs it: micro-batches in groups of K, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action, Op, Unit
from ..placement import Placement
from .registry import Schedule, register


def _order(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    _check(placement, slices)
    rows = [_row(place, placement, len(slices)) for place in range(placement.places)]
    return [
        [action for action in row if action.op is Op.FORWARD or placement.goes_backward(action.stage)] for row in rows
    ]


def _bound(placement: Placement, slices: Sequence[int]) -> list[int]:
    _check(placement, slices)
    most = []
    for place in range(placement.places):
        trained = sum(placement.goes_backward(stage) for stage in placement.stages_on(place))
        most.append(min(_warm_up(place, placement, len(slices)) + 1, trained * len(slices)))
    return most


def _check(placement: Placement, slices: Sequence[int]) -> None:
    places = placement.places
    if (
        any(stage.place != number % places for number, stage in enumerate(placement.stages))
        or len(placement.stages) % places
    ):
        raise ValueError(
            f"interleaved: got stages on places {[stage.place for stage in placement.stages]}, must be on 0, 1, ... "
            f"{places - 1} in turn, use Placement.interleaved"
        )
    if not slices or len(slices) % places or set(slices) != {1}:
        raise ValueError(
            f"interleaved: got {list(slices)} slices of the micro-batches, must be one each, and micro-batches a multiple of "
            f"the {places} places"
        )


def _warm_up(place: int, placement: Placement, micro_batches: int) -> int:
    places, stages = placement.places, len(placement.stages)
    # two steps for each place below, one there and one back, and all chunks but the last of the first group
    return min(micro_batches * stages // places, 2 * (places - place - 1) + stages - places)


def _row(place: int, placement: Placement, micro_batches: int) -> list[Action]:
    places, stages = placement.places, len(placement.stages)
    total, warm_up = micro_batches * stages // places, _warm_up(place, placement, micro_batches)

    def action(op: Op, index: int) -> Action:
        group, within = divmod(index, stages)
        chunk, member = divmod(within, places)
        if op is Op.BACKWARD:
            chunk = stages // places - 1 - chunk
        return Action(op, chunk * places + place, Unit(group * places + member, 0))

    row = [action(Op.FORWARD, index) for index in range(warm_up)]
    for index in range(total - warm_up):
        row += [action(Op.FORWARD, warm_up + index), action(Op.BACKWARD, index)]
    return row + [action(Op.BACKWARD, index) for index in range(total - warm_up, total)]


INTERLEAVED = register(Schedule("interleaved", _order, _bound))
