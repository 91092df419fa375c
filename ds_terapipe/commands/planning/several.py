"""Plans with several stages on each place."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ds_terapipe.commands.planning.cost_sources import Analytic, Measured
from ds_terapipe.commands.planning.inputs import AUTO, Inputs, choose_plan, plan_if_fits, read_inputs
from ds_terapipe.errors import bad_value
from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.plan.costs.memory import MemoryModel
from ds_terapipe.plan.improve import GAIN
from ds_terapipe.plan.parts import Parts, memory_of_parts
from ds_terapipe.plan.placed import placement_text
from ds_terapipe.plan.result import Plan, option_name, seconds_text
from ds_terapipe.schedule import Placement
from ds_terapipe.schedule.orders import INTERLEAVED


def read_placed(options: argparse.Namespace, unit_costs: bool = False, plan: Plan | None = None) -> Inputs:
    """Read the inputs on the placement that the plan, the configuration or ``--schedule interleaved`` asks for.

    Raises:
        ConfigError: as `read_inputs`; the costs do not know the stages of that placement.
    """
    inputs = read_inputs(options, unit_costs, plan)
    source, asked, present = inputs.source, _asked(inputs, plan), inputs.request.placement
    if placement_text(asked) == placement_text(present):
        return inputs
    key = "--plan" if plan else "--schedule" if inputs.config is None else "token_pipeline.stages_per_place"
    if isinstance(source, Measured):
        rule = f"as {source.path} was measured, {placement_text(present)}"
        raise bad_value(key, placement_text(asked), rule, "another --measured")
    found = placed(inputs, asked)
    if found is None:
        rule = f"a divisor of the layers of each of --stage-layers, {','.join(map(str, getattr(source, 'layers', ())))}"
        raise bad_value(key, f"{asked.stages_per_place} stages on a place", rule, "other --stages")
    return found


def _asked(inputs: Inputs, plan: Plan | None) -> Placement:
    """Return the placement that is asked for, which may be that of the costs."""
    config, present = inputs.config, inputs.request.placement
    places = present.places
    if plan is not None:
        return plan.placement
    if config is not None and config.stages_per_place > 1 < places:
        return Placement.named(config.placement, places, config.stages_per_place)
    if not present.is_usual or inputs.request.schedule != INTERLEAVED.name:
        return present
    if places == 1:
        raise bad_value("--schedule", INTERLEAVED.name, "another one on a single stage", "--stages 2")
    return Placement.interleaved(places, 2)


def placements(inputs: Inputs) -> dict[str, Inputs]:
    """Return the inputs for two stages on each place where their costs are known, by the placement's name."""
    placement = inputs.request.placement
    places = placement.places
    if places == 1 or not placement.is_usual or isinstance(inputs.source, Measured):
        return {}
    there = {name: placed(inputs, Placement.named(name, places, 2)) for name in ("interleaved", "v")}
    return {name: on for name, on in there.items() if on is not None}


def placed(inputs: Inputs, placement: Placement) -> Inputs | None:
    """Return the same inputs for another placement.

    Where it has several stages on each place they are equal parts of its layers; None where these do not divide.
    """
    source, chunks = inputs.source, placement.stages_per_place
    cost: Cost | None = None
    memory: MemoryModel | None
    if placement.is_usual:
        memory = source.memory(inputs.sequences)
    elif isinstance(source, Analytic):
        if any(count % chunks for count in source.layers):
            return None
        layout = source.with_layout(tuple(source.layers[stage.place] // chunks for stage in placement.stages))
        cost, memory = layout.cost(inputs.sequences), layout.memory(inputs.sequences)
    else:
        whole = source.memory(inputs.sequences)
        cost = Parts(source.cost(inputs.sequences), placement)
        memory = None if whole is None else memory_of_parts(whole, placement)
    request = replace(inputs.request, stages=placement, memory=memory)
    return replace(inputs, parts=cost, request=request)


def unplaced(inputs: Inputs) -> Inputs | None:
    """Return the same inputs with one stage on each place; None where these were not measured."""
    if inputs.request.placement.is_usual:
        return inputs
    return None if isinstance(inputs.source, Measured) else placed(inputs, Placement.plain(inputs.source.stages))


def choose_placed(inputs: Inputs, search_s: float) -> Plan:
    """Return the best plan with one stage on each place or two.

    Raises:
        ConfigError: as `choose_plan`.
    """
    others = placements(inputs) if inputs.request.schedule == AUTO else {}
    each = search_s / (1 + len(others))
    best = alone = choose_plan(inputs, search_s=each)
    for there in others.values():
        plan = plan_if_fits(there, search_s=each)
        if plan is not None and plan.step_s < min(best.step_s, alone.step_s * (1 - GAIN)):
            best = plan
    if best is alone:
        return alone
    name = option_name(alone.schedule, alone.slices)
    ratio = alone.step_s / best.step_s
    return replace(best, note=f"one stage on each place: {name} {seconds_text(alone.step_s)}, {ratio:.2f}x")
