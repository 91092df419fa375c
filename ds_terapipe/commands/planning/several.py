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
    source, asked, present = inputs.source, asked_placement(inputs, plan), inputs.request.placement
    if placement_text(asked) == placement_text(present):
        return inputs
    if isinstance(source, Measured):
        rule = f"as {source.path} was measured, {placement_text(present)}"
        raise bad_value(_key(inputs, plan), placement_text(asked), rule, "another --measured")
    return on_placement(inputs, asked, plan)


def on_placement(inputs: Inputs, asked: Placement, plan: Plan | None = None) -> Inputs:
    """Return `placed` inputs. Raises ConfigError where there are none."""
    found = placed(inputs, asked)
    if found is None:
        layers = getattr(inputs.source, "layers", ())
        rule = f"1 for {sum(layers)} layers in stages of {','.join(map(str, layers))}: a run cuts them evenly, a layer at least"
        raise bad_value(_key(inputs, plan), asked.stages_per_place, rule, "fewer --stages, or no --stage-layers")
    return found


def _key(inputs: Inputs, plan: Plan | None) -> str:
    """Return the origin of the placement that is asked for."""
    named = inputs.config is not None and inputs.config.stages_per_place > 1
    return "--plan" if plan else "token_pipeline.stages_per_place" if named else "--schedule: stages on a place"


def asked_placement(inputs: Inputs, plan: Plan | None = None) -> Placement:
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
    """Return the same inputs for another placement; None where `Analytic.on` has none.

    Where single layers are not known, stages on a place are their shares of what is known of it.
    """
    source, overhead_s = inputs.source, inputs.source.overhead_s
    cost: Cost | None = None
    memory: MemoryModel | None
    if placement.is_usual:
        memory = source.memory(inputs.sequences)
    elif isinstance(source, Analytic):
        layout = source.on(placement)
        if layout is None:
            return None
        cost, memory, overhead_s = layout.cost(inputs.sequences), layout.memory(inputs.sequences), layout.overhead_s
    else:
        whole = source.memory(inputs.sequences)
        cost = Parts(source.cost(inputs.sequences), placement)
        memory = None if whole is None else memory_of_parts(whole, placement)
    request = replace(inputs.request, stages=placement, memory=memory, overhead_s=overhead_s)
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
