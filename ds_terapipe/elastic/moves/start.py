"""Several stages on a place: the layers of a new ``PipelineModule`` go to their places before an engine is built.

DeepSpeed builds a contiguous range of layers on each rank. The layers move as in a `Reshape`, with the values that they
were built with. What DeepSpeed makes an optimizer of moves with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from torch import nn

from ds_terapipe.config import TOKEN_PIPELINE, TokenPipelineConfig
from ds_terapipe.elastic.moves.reshape import Reshape
from ds_terapipe.errors import ConfigError, bad_value, named
from ds_terapipe.model_chunks import PLAIN, ModelChunks
from ds_terapipe.pipeline.parameter_groups import check_inside, make_alike
from ds_terapipe.pipeline.shared_weights import refuse_split, shared_weights
from ds_terapipe.pipeline.teardown import shape_groups
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.plan.result import Plan
from ds_terapipe.process_groups import close_groups
from ds_terapipe.refusals import has_own_forward
from ds_terapipe.schedule import Placement

KEY = f"{TOKEN_PIPELINE}.stages_per_place"


def as_planned(settings: TokenPipelineConfig, watchdog: Watchdog) -> TokenPipelineConfig:
    """Return the settings with the placement of the plan of ``plan_path``, where they have none of their own; collective.

    Raises:
        ConfigError: on every rank, a plan that cannot be read.
    """
    path = settings.plan_path
    if path is None or settings.stages_per_place > 1:
        return settings
    consensus = Consensus(watchdog)

    def read() -> Placement:
        with named(f"{TOKEN_PIPELINE}.plan_path"):
            return Plan.load(path).placement

    try:
        placement: Placement = consensus.decide(read)
    finally:
        close_groups([consensus.group], consensus)
    if placement.is_plain:
        return settings
    for name in ("interleaved", "v"):
        there = settings.model_copy(update={"stages_per_place": placement.stages_per_place, "placement": name})
        if [stage.place for stage in placement.stages] == list(places_of(placement.places, there)):
            return there
    return settings


def place_stages(arguments: dict[str, Any], settings: TokenPipelineConfig, watchdog: Watchdog) -> None:
    """Move the layers of a module to their places; collective.

    Args:
        arguments: arguments of ``deepspeed.initialize``. The module keeps its identity, and so does an optimizer; the
            parameters are replaced.
        settings: the block ``token_pipeline``.
        watchdog: bounds the waits.

    Raises:
        ConfigError: on every rank; nothing has been changed.
    """
    model, stages_per_place = arguments["model"], settings.stages_per_place
    check_placeable(model, stages_per_place)  # the same on all ranks: none may close a group that others still make
    consensus = Consensus(watchdog)
    try:
        places = places_of(model.num_stages, settings)
        parts = parts_for(model, len(places), lambda: trained_sizes(model, consensus))
        refuse_split(shared_weights(model, consensus), parts, places, KEY)
        optimizer = optimizer_of(arguments)
        check_inside(optimizer, model, {}, consensus.gather, f"where {KEY} is {stages_per_place}")
        device = torch.device(get_accelerator().device_name(model.local_rank))
        reshape = Reshape(model, optimizer, consensus, device, dtype_of(model, consensus), KEY)
        reshape.prepare(model._topo, parts, places)
        make_alike(optimizer, arguments.get("lr_scheduler"), consensus.gather)
        before = shape_groups(model)
        names = dict(consensus.gather((model.stage_id, [name for name, _ in model.named_parameters()])))
        setattr(model, PLAIN, (ModelChunks(model).parts, [names[place] for place in sorted(names)]))
        reshape.run()
        close_groups(before - shape_groups(model))
        hand_back(arguments, optimizer)
    finally:
        close_groups([consensus.group], consensus)


def optimizer_of(arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer of the arguments, or a plain one of the parameters or groups of which DeepSpeed will make it."""
    given = arguments.get("model_parameters")
    if given is not None:
        given = arguments["model_parameters"] = list(given)
    optimizer = arguments.get("optimizer")
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    return torch.optim.Optimizer(given or [{"params": []}], {})


def hand_back(arguments: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Replace the parameters among the arguments by those of the moved layers, in groups where they were in groups."""
    given, groups = arguments.get("model_parameters"), optimizer.param_groups
    if given is None:
        return
    trained = [p for p in arguments["model"].parameters() if p.requires_grad]
    makes = optimizer is not arguments.get("optimizer")
    grouped = makes and given and isinstance(given[0], Mapping)
    arguments["model_parameters"] = groups if grouped else groups[0]["params"] if makes else trained


def places_of(places: int, settings: TokenPipelineConfig, layers: int | None = None) -> tuple[int, ...]:
    """Return the place of each stage, in a pipeline of so many places.

    A place alone has one stage. Given ``layers``, places have fewer stages than configured if there are too few layers.
    """
    each = 1 if places == 1 else settings.stages_per_place
    if layers is not None:
        each = min(each, layers // places)
    return tuple(stage.place for stage in Placement.named(settings.placement, places, each).stages)


def places_for(engine: Any, places: int) -> tuple[int, ...]:
    """Return the place of each stage of an engine whose pipeline has so many places."""
    return places_of(places, engine.token_pipeline, len(ModelChunks(engine.module).specs))


def parts_for(model: PipelineModule, stages: int, sizes_of: Callable[[], Mapping[str, int]]) -> list[int]:
    """Return the first entry of each stage, and the number of entries, by the rule that made the module's.

    DeepSpeed keeps no rule: it is the first by which it would cut as many stages as the module has in the same way. If
    it leaves a stage empty, stages have the same number of layers.

    Args:
        model: the module.
        stages: number of stages.
        sizes_of: returns the number of trained parameters of each layer, as `trained_sizes`.

    Raises:
        ConfigError: on every rank, for more stages than layers.
    """
    chunks, entries = ModelChunks(model), model._num_layers
    uniform: Callable[[int], list[int]] = partial(partition_uniform, entries)
    if hasattr(model, "even_parts"):  # a StagedPipeline
        parts = model.even_parts(stages)
    else:
        sizes = sizes_of()  # as DeepSpeed counts
        rules: list[Callable[[int], list[int]]] = [
            partial(partition_balanced, [sizes.get(prefix, 0) for prefix in chunks.prefixes]),
            uniform,
            *(partial(partition_balanced, weights) for weights in _binary(chunks.specs)),
        ]
        parts = next((cut for cut in rules if tuple(cut(model.num_stages)) == chunks.parts), rules[0])(stages)
        parts = uniform(stages) if _has_empty(parts) else parts
    if _has_empty(parts):
        rule = f"so few that each of the {stages} stages has one of the {entries} layers"
        raise bad_value(KEY, stages // model.num_stages, rule, f"at most {max(1, entries // model.num_stages)}")
    return [int(part) for part in parts]


def _has_empty(parts: Sequence[int]) -> bool:
    return any(start >= stop for start, stop in pairwise(parts))


def trained_sizes(model: PipelineModule, consensus: Consensus) -> dict[str, int]:
    """Return the number of trained parameters of each layer, by the prefix of their names; collective."""
    found: dict[str, int] = {}
    for of_rank in consensus.gather(sizes_of_layers(ModelChunks(model).layers)):
        found |= {prefix: max(size, found.get(prefix, 0)) for prefix, size in of_rank.items()}
    return found


def sizes_of_layers(layers: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return the number of trained parameters of each layer, by its key."""
    return {prefix: sum(p.numel() for p in layer.parameters() if p.requires_grad) for prefix, layer in layers.items()}


def _binary(specs: Iterable[Any]) -> list[list[int]]:
    """Return weights of the rules ``type:CLASS``, for each class of layers."""
    kinds = [spec.typename if isinstance(spec, LayerSpec) else type(spec) for spec in specs]
    layers = [kind for kind in dict.fromkeys(kinds) if isinstance(kind, type) and issubclass(kind, nn.Module)]
    return [[int(kind is layer) for kind in kinds] for layer in layers]


def dtype_of(model: PipelineModule, consensus: Consensus) -> torch.dtype | None:
    """Return the type of all weights; None if there are several, which layers then have as they are built."""
    mine = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    found = set().union(*consensus.gather(mine))
    return found.pop() if len(found) == 1 else None


def check_placeable(model: PipelineModule, stages_per_place: int) -> None:
    """Raises ConfigError for a model whose layers cannot be placed so."""
    if model.num_stages == 1:
        raise bad_value(KEY, stages_per_place, "1 for a model on one place", "num_stages=2 for the model, or 1")
    if ModelChunks(model).is_placed:
        raise ConfigError(
            f"{KEY}: got a PipelineModule of another engine, must be a new one, use PipelineModule(...) again"
        )
    if has_own_forward(model):
        rule = f"1 for {type(model).__name__}, which has a forward of its own"
        raise bad_value(KEY, stages_per_place, rule, "PipelineModule's own, or 1")
