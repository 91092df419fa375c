"""Several stages on a place of a checked launch: a rank builds the layers of its stages, and receives none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.elastic.moves.groups import numbers, refill
from ds_terapipe.elastic.moves.layers import layers_for, reassemble
from ds_terapipe.elastic.moves.start import (
    check_placeable,
    dtype_of,
    hand_back,
    optimizer_of,
    parts_for,
    places_of,
    sizes_of_layers,
)
from ds_terapipe.model_chunks import ModelChunks, entries_on

_CPU = torch.device("cpu")


class Alone:
    """`Consensus` of a rank that is checked: it decides, and gathers what is its own."""

    group = None

    def __init__(self, watchdog: Any = None) -> None:
        pass

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Return this rank's decision."""
        return decision()

    def gather(self, value: Any) -> list[Any]:
        """Return this rank's value."""
        return [value]


def place_layers(arguments: dict[str, Any], settings: TokenPipelineConfig, watchdog: Any) -> None:
    """Stand in for `start.place_stages`, whose layers come from other ranks; arguments as there.

    Weights of other ranks have groups that are not known here: they are in the optimizer's first one.
    """
    model = arguments["model"]
    check_placeable(model, settings.stages_per_place)
    places = places_of(model.num_stages, settings)
    parts = parts_for(model, len(places), lambda: _sizes(model))
    optimizer = optimizer_of(arguments)
    known = numbers(optimizer)
    group_of = {name: known[id(p)] for name, p in model.named_parameters() if id(p) in known}
    dtype = dtype_of(model, Alone())  # type: ignore[arg-type]
    layers = layers_for(model, entries_on(model.stage_id, parts, places), _CPU, dtype)
    reassemble(model, model._topo, parts, places, layers)
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    refill(optimizer, model, {name: group_of.get(name, 0) for name in trained}, {})
    hand_back(arguments, optimizer)


def _sizes(model: Any) -> dict[str, int]:
    """Return the number of trained parameters of each layer; they are built here, without memory."""
    specs = zip(ModelChunks(model).prefixes, ModelChunks(model).specs, strict=True)
    built = {prefix: spec.build() if hasattr(spec, "build") else spec for prefix, spec in specs}
    return sizes_of_layers({prefix: layer for prefix, layer in built.items() if isinstance(layer, nn.Module)})
