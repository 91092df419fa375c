"""Order of an optimizer's parameters on a stage: the module's, in which DeepSpeed's engines give them to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from torch import nn

from ds_terapipe.elastic.moves.layers import LOSS, modules_here
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.parameter_groups import names_in


class Member(NamedTuple):
    """A parameter of an optimizer, the number of its group, and that of its elements."""

    name: str
    group: int
    size: int


Members = Mapping[str, Sequence[Member]]  # by the prefix of their names


def numbers_of(engine: Any) -> dict[str, int]:
    """Return the parameter group number of each of this rank's trained parameters, by name."""
    return {name: number for number, names in enumerate(names_in(engine)) for name in names if name is not None}


def members_of(engine: Any, gather: Callable[[Any], list[Any]]) -> Members:
    """Return the optimizer's parameters in each layer, and in the loss; collective."""
    number_of, here = numbers_of(engine), modules_here(engine.module)
    mine = {prefix: _members(prefix, layer, number_of) for prefix, layer in here.items()}
    found: dict[str, dict[str, Member]] = {}
    for of_rank in gather(mine):
        for prefix, members in of_rank.items():  # of a tied layer's copies one may have more than another
            found.setdefault(prefix, {}).update({member.name: member for member in members})
    return {prefix: [*members.values()] for prefix, members in found.items()}


def _members(prefix: str, layer: nn.Module, number_of: Mapping[str, int]) -> list[Member]:
    named = [(prefix + name, p.numel()) for name, p in layer.named_parameters()]
    return [Member(name, number_of[name], size) for name, size in named if name in number_of]


def plain_members(chunks: ModelChunks, members: Members) -> list[list[Member]]:
    """Return the parameters of each stage of a plain pipeline on as many places."""
    names, of_name = chunks.plain_names, {member.name: member for member in chain(*members.values())}
    if names is not None:
        return [[of_name[name] for name in of_place if name in of_name] for of_place in names]
    places = {*chunks.places}
    parts = chunks.parts[:: len(chunks.places) // len(places)]
    return [stage_members(range(start, stop), chunks, members) for start, stop in pairwise(parts)]


def stage_members(entries: Sequence[int], chunks: ModelChunks, members: Members) -> list[Member]:
    """Return the parameters of a stage with these entries.

    A module has its loss first, which is on every stage, and then tied layers.
    """
    prefixes = list(dict.fromkeys(map(chunks.prefix, entries)))
    tied = [prefix for prefix in prefixes if chunks.is_tied(prefix)]
    found = list(members.get(LOSS, ()))
    for prefix in tied:
        found += [each for each in members.get(prefix, ()) if not chunks.leaves_out(prefix, entries, each.name)]
    return found + [member for prefix in prefixes if prefix not in tied for member in members.get(prefix, ())]


def names_by_group(members: Sequence[Member], groups: int) -> list[list[str]]:
    """Return the names in each of so many parameter groups."""
    return [[member.name for member in members if member.group == number] for number in range(groups)]


def counts_by_group(members: Sequence[Member], groups: int, joined: bool) -> list[int]:
    """Return the number of parameters in each of so many groups, and further ones; ``joined``: of their elements."""
    found = [0] * max(groups, *(member.group + 1 for member in members), 0)
    for member in members:
        found[member.group] += member.size if joined else 1
    return found
