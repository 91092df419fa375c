"""Plans with several stages on each place."""

from __future__ import annotations

from dataclasses import replace

from ds_terapipe.commands.planning.cost_sources import Measured, chunked
from ds_terapipe.commands.planning.inputs import AUTO, Inputs, choose_plan
from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.improve import GAIN
from ds_terapipe.plan.result import Option, Plan, seconds_text
from ds_terapipe.schedule import Placement


def placements(inputs: Inputs) -> dict[str, Inputs]:
    """Return the inputs for two stages on each place where their costs are known, by the placement's name."""
    places = inputs.request.stages
    if places == 1 or inputs.request.placement is not None:
        return {}
    found = {"interleaved": Placement.interleaved(places, 2), "v": Placement.v(places)}
    there = {name: placed(inputs, placement) for name, placement in found.items()}
    return {name: on for name, on in there.items() if on is not None}


def placed(inputs: Inputs, placement: Placement | None) -> Inputs | None:
    """Return the same inputs for another placement, None for none; None where the costs do not know its stages."""
    source = inputs.source
    if placement is None:
        return inputs
    there = None if isinstance(source, Measured) else chunked(source, inputs.sequences, placement)
    if there is None:
        return None
    cost, memory = there
    request = replace(inputs.request, stages=len(placement.stages), placement=placement, memory=memory)
    return replace(inputs, parts=cost, request=request)


def choose_placed(inputs: Inputs, search_s: float) -> Plan:
    """Return the best plan with one stage on each place or two.

    Raises:
        ConfigError: as `choose_plan`.
    """
    others = placements(inputs) if inputs.request.schedule == AUTO else {}
    each = search_s / (1 + len(others))
    best = alone = choose_plan(inputs, search_s=each)
    for there in others.values():
        try:
            plan = choose_plan(there, search_s=each)
        except ConfigError:  # it does not fit
            continue
        if plan.step_s < min(best.step_s, alone.step_s * (1 - GAIN)):
            best = plan
    if best is alone:
        return alone
    name = Option(alone.schedule, alone.slices, 0.0).name
    ratio = alone.step_s / best.step_s
    return replace(best, note=f"one stage on each place: {name} {seconds_text(alone.step_s)}, {ratio:.2f}x")
