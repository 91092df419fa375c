"""Costs and memory of several stages on each place, each an equal part of a stage that is known as a whole."""

from __future__ import annotations

from dataclasses import replace

from ds_terapipe.plan.costs.cost import Cost, Tokens
from ds_terapipe.plan.costs.memory import MemoryModel
from ds_terapipe.schedule import Placement

_DIVIDED = ("activations", "keys_values", "key_value_gradients", "weight_gradients", "fixed", "gradient_sums")


class Parts:
    """A `Cost` of virtual stages, each a part of a stage whose layers are not known."""

    def __init__(self, whole: Cost, placement: Placement) -> None:
        self._whole, self._placement = whole, placement
        self._share = placement.places / len(placement.stages)
        self.sequences, self.max_length = whole.sequences, whole.max_length

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self._whole.forward(self._placement.place_of(stage), length, context) * self._share

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self._whole.backward(self._placement.place_of(stage), length, context) * self._share

    def weights(self, stage: int, length: Tokens) -> Tokens:
        return self._whole.weights(self._placement.place_of(stage), length) * self._share

    def message(self, boundary: int, length: Tokens) -> Tokens:
        # between the last device and the first nothing was measured: the boundary at the first one stands for it
        ends = self._placement.place_of(boundary), self._placement.place_of(boundary + 1)
        return self._whole.message(min(*ends, self._placement.places - 2), length)


def memory_of_parts(whole: MemoryModel, placement: Placement) -> MemoryModel:
    """Return the memory of such stages; each boundary has the largest message of all."""
    share, last = placement.places / len(placement.stages), len(placement.stages) - 1
    received, sent = (max(getattr(stage, name) for stage in whole.stages) for name in ("received", "sent"))
    stages = []
    for number, where in enumerate(placement.stages):
        stage = whole.stages[where.place]
        divided = {name: share * getattr(stage, name) for name in _DIVIDED}
        ends = {
            "received": received * (number > 0),
            "sent": sent * (number < last),
            "losses": stage.losses * (number == last),
        }
        stages.append(replace(stage, **divided, **ends))
    return replace(whole, stages=tuple(stages))
