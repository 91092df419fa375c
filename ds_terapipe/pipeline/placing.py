"""Placement of a ``PipelineModule``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ds_terapipe.errors import ConfigError
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.tied import tied_weights
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.refusals import has_own_forward
from ds_terapipe.schedule import Placement


class _Layer(NamedTuple):
    """Whether a layer has parameters, and whether one of them is trained."""

    has_weights: bool
    trains: bool


class Part(NamedTuple):
    """A range of the model's layers on one rank."""

    place: int
    first_layer: int
    layers: tuple[_Layer, ...]
    whole: bool  # these layers cannot be divided among stages
    tied: tuple[tuple[str, str, bool], ...]  # key and name of each tied weight, and whether it is trained here

    @property
    def stop_layer(self) -> int:
        return self.first_layer + len(self.layers)


def placement_of(module: Any, consensus: Consensus) -> Placement:
    """Return the placement of a module's layers; layers before the first trained weight are forward-only.

    If nothing is frozen, the stages are those of the module. One that begins with frozen layers of the model's
    beginning, and has others, becomes two: a forward-only one, and one that also runs backward.

    Collective. A model without trained weights is forward-only: it can be evaluated.

    Args:
        module: a ``PipelineModule``.
        consensus: consensus of the job.

    Raises:
        ConfigError: on every rank, for a tied weight that some ranks train and others freeze: they would wait for each
            other's gradients.
    """
    return placement_of_parts(part for of_rank in consensus.gather(parts_of(module)) for part in of_rank)


def placement_of_parts(gathered: Iterable[Part]) -> Placement:
    """Return the placement of a model from the parts of all ranks; see `placement_of`, for errors too."""
    parts = sorted({part.first_layer: part for part in gathered}.values(), key=attrgetter("first_layer"))
    _check_tied(parts)
    layers = [layer for part in parts for layer in part.layers]
    count = next((n for n, layer in enumerate(layers) if layer.trains), len(layers))
    places, boundaries, forward_only = [], [], 0
    for part in parts:
        cut = _cut(part, count)
        ends = [part.first_layer, *([cut] if part.first_layer < cut < part.stop_layer else [])]
        places += [part.place] * len(ends)
        boundaries += ends
        forward_only += cut > part.first_layer
    return Placement.of(places, [*boundaries, parts[-1].stop_layer], forward_only)


def parts_of(module: Any) -> list[Part]:
    """Return the parts of a ``PipelineModule`` that are on this rank, one for each of its stages."""
    chunks = ModelChunks(module)
    layers = {entry: _layer(function) for entry, function in chunks.functions.items()}
    # weights of the module itself may be used anywhere, weights of its loss only there
    holders = [
        each
        for function in (*chunks.functions.values(), getattr(module, "loss_fn", None))
        for each in modules_of(function)
    ]
    inside = {id(parameter) for each in holders for parameter in each.parameters()}
    whole = has_own_forward(module) or any(id(p) not in inside for p in module.parameters() if p.requires_grad)
    if whole:
        trains = any(p.requires_grad for p in module.parameters())
        layers = dict.fromkeys(layers, _Layer(True, trains))
    tied = tuple(
        (key, name, weight.requires_grad)
        for key, comm in module.tied_comms.items()
        for name, weight in zip(comm["weight_attr"], tied_weights(comm), strict=True)
    )
    return [
        Part(module.stage_id, entries.start, tuple(layers[entry] for entry in entries), whole, tied)
        for entries in chunks.ranges
    ]


def _layer(function: Any) -> _Layer:
    weights = [weight for module in modules_of(function) for weight in module.parameters()]
    return _Layer(bool(weights), any(weight.requires_grad for weight in weights))


def _cut(part: Part, frozen: int) -> int:
    """Return the end of a place's forward-only layers. A stage of layers without weights would be useless."""
    cut = min(max(frozen, part.first_layer), part.stop_layer)
    if cut == part.stop_layer:
        return cut
    before = part.layers[: cut - part.first_layer]
    return cut if not part.whole and any(layer.has_weights for layer in before) else part.first_layer


def _check_tied(parts: Sequence[Part]) -> None:
    known: dict[tuple[str, str], tuple[Part, bool]] = {}
    for part in parts:
        for key, name, trained in part.tied:
            other, trained_there = known.setdefault((key, name), (part, trained))
            if trained_there != trained:
                on = "trained" if trained else "frozen"
                raise ConfigError(
                    f'model: got the tied layer "{key}" {on} on stage {part.place} and not on stage {other.place}, must be the '
                    "same on all stages that share it, use requires_grad_() alike"
                )
