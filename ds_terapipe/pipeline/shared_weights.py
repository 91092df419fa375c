"""Trained weights that several entries of a layer list share without a ``TiedLayerSpec``.

Entries on one stage train such a weight together. On several stages each stage would train a copy, and the copies drift
apart. A rank builds only its own layers, so it sees their weights, and those of all modules that are themselves in the
list.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.transport.consensus import Consensus

_SHOWN = 4


class Shared(NamedTuple):
    """Weights shared by the same entries.

    Attributes:
        entries: entries of the layer list, in order; the loss comes after the last one.
        names: names of the weights within the first entry.
        kind: class of the first entry.
    """

    entries: tuple[int, ...]
    names: tuple[str, ...]
    kind: str


class _Weight(NamedTuple):
    """Identity of a weight, the same on all ranks.

    Attributes:
        entry: the first entry with it.
        part: index of the entry's argument; -1: the built layer.
        name: name of the weight there.
    """

    entry: int
    part: int
    name: str


def shared_weights(module: PipelineModule, consensus: Consensus, also: Collection[str] = ()) -> list[Shared]:
    """Find the weights that entries of different names share; the same list on all ranks; collective.

    Args:
        module: the live module.
        consensus: consensus of the job.
        also: names of frozen parameters that count as trained.
    """
    users: dict[_Weight, set[int]] = {}
    for of_rank in consensus.gather(_users(module, also)):
        for weight, entries in of_rank.items():
            users.setdefault(weight, set()).update(entries)
    owners = [*ModelChunks(module).prefixes, "loss_fn."]
    weights: dict[tuple[int, ...], list[_Weight]] = {}
    for weight, entries in users.items():
        if len({owners[entry] for entry in entries}) > 1:
            weights.setdefault(tuple(sorted(entries)), []).append(weight)
    return [
        Shared(entries, tuple(each.name for each in of_entries), _class_of(module, of_entries[0].entry))
        for entries, of_entries in weights.items()
    ]


def split(shared: Sequence[Shared], parts: Sequence[int], places: Sequence[int]) -> Shared | None:
    """Return the first weights that these stages would split among places.

    Args:
        shared: weights that entries share.
        parts: first entries of the stages, then the number of entries.
        places: place of each stage.
    """
    return next((each for each in shared if len(set(_places(each, parts, places))) > 1), None)


def refuse_split(
    shared: Sequence[Shared], parts: Sequence[int], places: Sequence[int], key: str, use: str = ""
) -> None:
    """Refuse stages that would split weights shared by their entries.

    Args:
        shared, parts, places: as for `split`.
        key: beginning of the error message.
        use: alternative to tying the entries, for the message.

    Raises:
        ConfigError: naming the entries, the stages and the weights.
    """
    found = split(shared, parts, places)
    if found is None:
        return
    entries = _and("the loss" if entry == parts[-1] else entry for entry in found.entries)
    word = "stages" if list(places) == list(range(len(places))) else "places"
    stages = _and(sorted(set(_places(found, parts, places))))
    names = [f'"{name}"' for name in found.names[:_SHOWN]] + ["..."] * (len(found.names) > _SHOWN)
    raise ConfigError(
        f"{key}: got entries {entries} of the layer list on {word} {stages}, which share trained "
        f'weights and would train copies, must be tied or on one {word[:-1]}, use TiedLayerSpec("shared", {found.kind}, ..., '
        f"tied_weight_attr=[{', '.join(names)}]) at each of them, with a forward_fn where it does something else{use}"
    )


def _and(items: Iterable[Any]) -> str:
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}"


def _places(shared: Shared, parts: Sequence[int], places: Sequence[int]) -> list[int]:
    return [places[min(bisect_right(parts, entry), len(parts) - 1) - 1] for entry in shared.entries]


def _users(module: PipelineModule, also: Collection[str]) -> dict[_Weight, set[int]]:
    """Return entries by weight, for weights that other ranks may see, or that several entries use here."""
    chunks, loss = ModelChunks(module), module.loss_fn
    here, specs = chunks.layers, chunks.specs
    holders: list[list[nn.Module]] = [[each] if isinstance(each, nn.Module) else [] for each in (*specs, loss)]
    for entry in chunks.entries:
        holders[entry] += [here[name] for name in [chunks.prefix(entry)] if name in here]
    known = {id(inside) for of_entry in holders[:-1] for holder in of_entry for inside in holder.modules()}
    for entry, function in enumerate((*specs, loss)):
        holders[entry] += [each for each in modules_of(function) if id(each) in known]
    named, counting = _named(module), {id(p) for name, p in module.named_parameters() if name in also}
    found: dict[_Weight, set[int]] = {}
    for entry, of_entry in enumerate(holders):
        for name, parameter in (pair for holder in of_entry for pair in holder.named_parameters()):
            if parameter.requires_grad or id(parameter) in counting:
                weight = named.setdefault(id(parameter), _Weight(entry, -1, name))
                found.setdefault(weight, set()).add(entry)
    return {weight: entries for weight, entries in found.items() if weight.part >= 0 or len(entries) > 1}


def _named(module: PipelineModule) -> dict[int, _Weight]:
    """Return weights in the layer list before anything is built, also those in the arguments of specs."""
    found: dict[int, _Weight] = {}
    for entry, spec in enumerate(ModelChunks(module).specs):
        given = [*spec.module_args, *spec.module_kwargs.values()] if isinstance(spec, LayerSpec) else [spec]
        for number, part in enumerate(given):
            for name, parameter in _parameters_in(part):
                found.setdefault(id(parameter), _Weight(entry, number, name))
    return found


def _parameters_in(given: Any) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(given, nn.Parameter):
        yield "weight", given
    elif isinstance(given, nn.Module):
        yield from given.named_parameters()
    elif isinstance(given, (list, tuple)):
        for number, part in enumerate(given):
            yield from ((f"{number}.{name}", parameter) for name, parameter in _parameters_in(part))


def _class_of(module: PipelineModule, entry: int) -> str:
    spec = (*ModelChunks(module).specs, module.loss_fn)[entry]
    return spec.typename.__name__ if isinstance(spec, LayerSpec) else type(spec).__name__
