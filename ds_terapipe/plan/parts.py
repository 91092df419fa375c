"""Several stages on a place, each a part of a stage that is known as a whole: costs, memory, and advice."""

from __future__ import annotations

from dataclasses import replace

from ds_terapipe.plan.costs.cost import Cost, Tokens
from ds_terapipe.plan.costs.memory import MemoryModel
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.result import Plan, seconds_text
from ds_terapipe.plan.stages import WORTH
from ds_terapipe.schedule import Placement
from ds_terapipe.schedule.orders import ZERO_BUBBLE

_DIVIDED = ("activations", "keys_values", "key_value_gradients", "weight_gradients", "fixed", "gradient_sums")


class Parts:
    """A `Cost` of virtual stages, each a part of a stage: its share of the layers on its place."""

    def __init__(self, whole: Cost, placement: Placement) -> None:
        self._whole, self._placement = whole, placement
        self._shares = _shares(placement)
        self.sequences, self.max_length = whole.sequences, whole.max_length

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self._whole.forward(self._placement.place_of(stage), length, context) * self._shares[stage]

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self._whole.backward(self._placement.place_of(stage), length, context) * self._shares[stage]

    def weights(self, stage: int, length: Tokens) -> Tokens:
        return self._whole.weights(self._placement.place_of(stage), length) * self._shares[stage]

    def message(self, boundary: int, length: Tokens) -> Tokens:
        # between the last device and the first nothing was measured: the boundary at the first one stands for it
        ends = self._placement.place_of(boundary), self._placement.place_of(boundary + 1)
        return self._whole.message(min(*ends, self._placement.places - 2), length)


def memory_of_parts(whole: MemoryModel, placement: Placement) -> MemoryModel:
    """Return the memory of such stages; each boundary has the largest message of all."""
    shares, last = _shares(placement), len(placement.stages) - 1
    received, sent = (max(getattr(stage, name) for stage in whole.stages) for name in ("received", "sent"))
    stages = []
    for number, where in enumerate(placement.stages):
        stage = whole.stages[where.place]
        divided = {name: shares[number] * getattr(stage, name) for name in _DIVIDED}
        ends = {
            "received": received * (number > 0),
            "sent": sent * (number < last),
            "losses": stage.losses * (number == last),
        }
        stages.append(replace(stage, **divided, **ends))
    return replace(whole, stages=tuple(stages))


def _shares(placement: Placement) -> list[float]:
    sizes = [stop - first for _, first, stop in placement.stages]
    return [
        size / sum(sizes[each] for each in placement.stages_on(stage.place))
        for size, stage in zip(sizes, placement.stages, strict=True)
    ]


def advice_on_two_stages(cost: Cost, request: Request, plan: Plan) -> str:
    """Return a line on the better placement of two stages on each place, each half of a stage; empty if none pays.

    Only ``"zero_bubble"`` is simulated, in the slices of the plan: a whole choice takes long beside a training step.

    Args:
        cost, request: of a plan with one stage on each place.
        plan: the plan.
    """
    where, found = request.placement, []
    halves = all(stage.stop_layer - stage.first_layer > 1 for stage in where.stages)
    if request.schedule != "auto" or where.places == 1 or not where.is_plain or where.forward_only or not halves:
        return ""
    for key, placement in (
        ("", Placement.interleaved(where.places, 2)),
        (', "placement": "v"', Placement.v(where.places)),
    ):
        memory = None if request.memory is None else memory_of_parts(request.memory, placement)
        there = replace(request, stages=placement, memory=memory)
        times = there.times(Parts(cost, placement))
        if there.fits(ZERO_BUBBLE.name, plan.slices):
            found.append((times.seconds(ZERO_BUBBLE.name, plan.slices) + request.overhead_s, key))
    seconds, key = min(found, default=(plan.step_s, ""))
    if seconds >= plan.step_s * (1 - WORTH):
        return ""
    ratio = f"{seconds_text(seconds)}, {plan.step_s / seconds:.2f}x as fast"
    return f'plan: two stages on each place would take {ratio}: use "stages_per_place": 2{key}'
