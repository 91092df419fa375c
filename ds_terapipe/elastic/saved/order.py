"""Order of an optimizer's parameters on a stage: the module's, in which DeepSpeed's engines give them to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ds_terapipe.deepspeed_state import groups_of
from ds_terapipe.elastic.moves.groups import numbers
from ds_terapipe.elastic.moves.layers import LOSS, modules_here
from ds_terapipe.elastic.moves.masters import is_wrapped


class Member(NamedTuple):
    """A parameter of an optimizer, the number of its group, and that of its elements."""

    name: str
    group: int
    size: int


Members = Mapping[str, Sequence[Member]]  # by the prefix of their names


def numbers_of(engine: Any) -> dict[str, int]:
    """Return the parameter group number of each of this rank's trained parameters, by name."""
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    number_of = numbers(engine.basic_optimizer)
    if is_wrapped(engine.optimizer):
        number_of = {id(p): number for number, group in enumerate(groups_of(engine.optimizer)) for p in group}
    return {name_of[key]: number for key, number in number_of.items() if key in name_of}


def members_of(engine: Any, gather: Callable[[Any], list[Any]]) -> Members:
    """Return the optimizer's parameters in each layer, and in the loss; collective."""
    number_of, here = numbers_of(engine), modules_here(engine.module)
    mine = {prefix: _members(prefix, layer, number_of) for prefix, layer in here.items()}
    return {prefix: members for of_rank in gather(mine) for prefix, members in of_rank.items()}


def _members(prefix: str, layer: nn.Module, number_of: Mapping[str, int]) -> list[Member]:
    named = [(prefix + name, p.numel()) for name, p in layer.named_parameters()]
    return [Member(name, number_of[name], size) for name, size in named if name in number_of]


def stage_members(prefixes: Sequence[str], members: Members) -> list[Member]:
    """Return the parameters of a stage with layers of these prefixes.

    A module has its loss first, which is on every stage, and then tied layers.
    """
    ordered = sorted(
        dict.fromkeys([LOSS, *prefixes]), key=lambda each: (each != LOSS, not each.startswith("tied_modules."))
    )
    return [member for prefix in ordered for member in members.get(prefix, ())]


def names_by_group(members: Sequence[Member], groups: int) -> list[list[str]]:
    """Return the names in each of so many parameter groups."""
    return [[member.name for member in members if member.group == number] for number in range(groups)]
