"""Advice on two stages on each place, from the costs of one."""

from __future__ import annotations

from dataclasses import replace

from ds_terapipe.plan.choose import Request
from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.plan.costs.layers import WORTH
from ds_terapipe.plan.costs.parts import Parts, memory_of_parts
from ds_terapipe.plan.result import Plan, seconds_text
from ds_terapipe.schedule import Placement
from ds_terapipe.schedule.orders import ZERO_BUBBLE


def advice(cost: Cost, request: Request, plan: Plan) -> str:
    """Return a line on the better placement of two stages on each place, each half of a stage; empty if none pays.

    Only ``"zero_bubble"`` is simulated, in the slices of the plan: a whole choice takes long beside a training step.

    Args:
        cost, request: of a plan with one stage on each place.
        plan: the plan.
    """
    where, found = request.where, []
    halves = all(stage.stop_layer - stage.first_layer > 1 for stage in where.stages)
    if request.schedule != "auto" or where.places == 1 or not where.is_plain or where.forward_only or not halves:
        return ""
    for key, placement in (
        ("", Placement.interleaved(where.places, 2)),
        (', "placement": "v"', Placement.v(where.places)),
    ):
        memory = None if request.memory is None else memory_of_parts(request.memory, placement)
        there = replace(request, stages=len(placement.stages), placement=placement, memory=memory)
        times = there.times(Parts(cost, placement))
        if there.fits(ZERO_BUBBLE.name, plan.slices):
            found.append((times.seconds(ZERO_BUBBLE.name, plan.slices) + request.overhead_s, key))
    seconds, key = min(found, default=(plan.step_s, ""))
    if seconds >= plan.step_s * (1 - WORTH):
        return ""
    ratio = f"{seconds_text(seconds)}, {plan.step_s / seconds:.2f}x as fast"
    return f'plan: two stages on each place would take {ratio}: use "stages_per_place": 2{key}'
