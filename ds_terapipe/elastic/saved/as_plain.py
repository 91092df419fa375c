"""Optimizer state of several stages on a place, in the form in which a plain pipeline on as many places saves it.

DeepSpeed 0.19.8 reads a rank's state by the numbers of its stage's parameters, in the module's order, or by their place
in flat tensors. So each rank gets, from the ranks that have it, the state of a plain stage, and saves it as its own.
Files then depend on no placement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from ds_terapipe.deepspeed_state import Run, SavedTensor, one_each, saved_tensors, with_masters
from ds_terapipe.elastic.moves.groups import has_one_count
from ds_terapipe.elastic.moves.shares import copy_common
from ds_terapipe.elastic.moves.transfer import MASTER, has_moved
from ds_terapipe.elastic.saved.by_name import BASE, FLAT, PLAIN, Elements, groups_in, layout_of, states_in
from ds_terapipe.elastic.saved.order import Members, members_of, names_by_group, plain_members
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.overrides import replaced
from ds_terapipe.pipeline.parameter_groups import names_in, settings_of
from ds_terapipe.pipeline.transport.consensus import Consensus


class _Held(NamedTuple):
    """Description of a rank's state.

    Attributes:
        names: of each parameter the number of elements here, and its state: the type of tensors like it, else the value.
        moved: names of parameters whose elements here have had a gradient.
        shapes: of all parameters here.
        settings: of each parameter group, and whether it has parameters here.
    """

    place: int
    data: int
    tensor: int
    names: Mapping[str, tuple[int, Mapping[str, Any]]]
    moved: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    settings: Sequence[tuple[dict[str, Any], bool]]


class _Source(NamedTuple):
    """Rank with elements of a parameter, from ``first`` to ``stop``, and the parameter's state as in `_Held`."""

    rank: int
    first: int
    stop: int
    state: Mapping[str, Any]


@contextmanager
def saved_as_plain(engine: Any, consensus: Consensus) -> Iterator[list[list[str]]]:
    """Context manager in which an engine's optimizer gives a plain stage's ``state_dict``; collective.

    Yields the names of its parameters, by group.
    """
    names, state = _state_for(engine, consensus)
    with replaced(engine.optimizer, state_dict=lambda *args, **kwargs: state):
        yield names


def _state_for(engine: Any, consensus: Consensus) -> tuple[list[list[str]], dict[str, Any]]:
    kind, topology = layout_of(engine), engine.module._topo
    saved, members = engine.optimizer.state_dict(), members_of(engine, consensus.gather)
    shapes = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    mine = _mine(engine, kind, saved, shapes)
    at = topology.get_coord(engine.global_rank)
    held = _held(at, kind, saved, mine, shapes, names_in(engine))
    # replicas have the same where they divide nothing, and one of them saves it
    said = {
        rank: each
        for rank, each in zip(consensus.job.ranks, consensus.gather(held), strict=True)
        if each.tensor == held.tensor and (kind == FLAT or not each.data)
    }
    shapes = {name: shape for each in said.values() for name, shape in each.shapes.items()}
    count, plain = len(groups_in(kind, saved)), plain_members(ModelChunks(engine.module), members)
    names = [names_by_group(of_stage, count) for of_stage in plain]
    sources = _sources(said)
    tensors = {
        rank: list(_tensors(engine.optimizer, kind, names[each.place], shapes, each.data, topology.get_dim("data")))
        for rank, each in said.items()
    }
    got = _exchange(tensors, sources, mine, engine.global_rank, consensus)
    here = tensors.get(engine.global_rank, [])
    states = []
    for number, tensor in enumerate(here):
        runs = [(run, got.get((number, run.name), {})) for run in tensor.runs]
        states.append(_joined(tensor, runs, _like(tensor, sources, members, kind)))
    return names[at.pipe], _form(engine.optimizer, kind, saved, here, states, _settings(said))


def _like(
    tensor: SavedTensor, sources: Mapping[str, Sequence[_Source]], members: Members, kind: str
) -> Mapping[str, Any]:
    """Return the state of a tensor's first parameter; flat tensors without any are like others of the group."""
    names = [run.name for run in tensor.runs]
    if kind == FLAT or not names:
        names += [member.name for member in chain(*members.values()) if member.group == tensor.group]
    found = next((sources[name][0].state for name in names if name in sources), None)
    return {MASTER: torch.float32} if found is None and kind != PLAIN else found or {}


def _mine(engine: Any, kind: str, saved: Any, shapes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return this rank's state by name, tensors like their parameters as `Elements`."""
    sizes, levels = {name: prod(shape) for name, shape in shapes.items()}, has_one_count(engine.basic_optimizer)
    found = {}
    for name, state in states_in(kind, saved, names_in(engine), sizes, levels):
        if name not in shapes:
            continue  # a stand-in
        found[name] = {
            key: Elements(value.detach().reshape(-1)) if getattr(value, "shape", None) == shapes[name] else value
            for key, value in state.items()
        }
    return found


def _held(
    at: Any, kind: str, saved: Any, mine: Mapping[str, Any], shapes: Mapping[str, Any], names: Sequence[Any]
) -> _Held:
    described: dict[str, tuple[int, dict[str, Any]]] = {}
    moved = set()
    for name, state in mine.items():
        flat = {key: value.values for key, value in state.items() if isinstance(value, Elements)}
        length = max((values.numel() for values in flat.values()), default=0)
        described[name] = length, {key: _described(value) for key, value in state.items()}
        moved |= {name} if has_moved(flat) else set()
    settings = [
        (settings_of(group), any(name in shapes for name in of_group))
        for group, of_group in zip(groups_in(kind, saved), names, strict=True)
    ]
    return _Held(at.pipe, at.data, getattr(at, "model", 0), described, frozenset(moved), shapes, settings)


def _described(value: Any) -> Any:
    """Return the type of elements; another tensor in host memory: unpickled, it would be on the sender's device."""
    if isinstance(value, Elements):
        return value.values.dtype
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _sources(said: Mapping[int, _Held]) -> dict[str, list[_Source]]:
    """Return the ranks that have a parameter's elements, of the first place that has used it, or has a state of it."""
    found: dict[str, list[_Source]] = {}
    place_of: dict[str, int] = {}
    in_order = sorted(said.items(), key=lambda item: (item[1].place, item[1].data))
    for _, each in reversed(in_order):
        place_of |= dict.fromkeys(each.moved, each.place)
    for rank, each in in_order:
        for name, (length, state) in each.names.items():
            if state and place_of.setdefault(name, each.place) == each.place:
                of_name = found.setdefault(name, [])
                first = of_name[-1].stop if of_name else 0
                of_name.append(_Source(rank, first, first + length, state))
    return found


def _tensors(
    wrapper: Any, kind: str, names: Sequence[Sequence[str]], shapes: Mapping[str, Any], data: int, replicas: int
) -> Iterator[SavedTensor]:
    """Yield the tensors of a rank of replica number ``data``, as DeepSpeed's wrappers make them."""
    for group, members in enumerate(names):
        of_group = {name: shapes[name] for name in members}
        if kind == PLAIN:
            yield from one_each(group, of_group)
        else:
            yield from saved_tensors(wrapper, group, of_group, data, replicas)


def _exchange(
    tensors: Mapping[int, Sequence[SavedTensor]],
    sources: Mapping[str, Sequence[_Source]],
    mine: Mapping[str, Mapping[str, Any]],
    rank: int,
    consensus: Consensus,
) -> dict[tuple[int, str], dict[str, Tensor]]:
    """Return the elements of each run of this rank's tensors, by the tensor's number and the parameter's name.

    All ranks do all transfers in one order: each waits for its first unfinished one, so they cannot deadlock.
    """
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    for target, of_target in tensors.items():
        for (number, run), source in _wanted(of_target, sources):
            first, stop = max(run.first, source.first), min(run.stop, source.stop)
            if first >= stop or rank not in (source.rank, target):
                continue
            types = {key: kind for key, kind in source.state.items() if isinstance(kind, torch.dtype)}
            got = {key: torch.empty(stop - first, dtype=kind) for key, kind in types.items()}
            for key, room in got.items():
                if rank == source.rank:
                    room.copy_(mine[run.name][key].values[first - source.first : stop - source.first])
                if source.rank != target:
                    _send(room, source.rank, target, rank, f"the state of {run.name}", consensus)
            if rank == target:
                here = found.setdefault((number, run.name), {})
                for key, room in got.items():
                    whole = here.setdefault(key, torch.zeros(run.stop - run.first, dtype=room.dtype))
                    copy_common(whole, run.first, room, first)
    return found


def _wanted(
    tensors: Sequence[SavedTensor], sources: Mapping[str, Sequence[_Source]]
) -> Iterator[tuple[tuple[int, Run], _Source]]:
    for number, tensor in enumerate(tensors):
        for run in tensor.runs:
            for source in sources.get(run.name, ()):
                yield (number, run), source


def _send(room: Tensor, source: int, target: int, rank: int, what: str, consensus: Consensus) -> None:
    message, wait = room.view(torch.uint8), consensus.watchdog.wait_on_host
    if rank == source:
        wait(torch.distributed.isend(message, target, group=consensus.group), f"rank {target} to take {what}")
    else:
        wait(torch.distributed.irecv(message, source, group=consensus.group), f"{what} from rank {source}")


def _settings(said: Mapping[int, _Held]) -> list[dict[str, Any]]:
    """Return the settings of each group from a rank with parameters of it: a step count may be among them."""
    by_group = zip(*(each.settings for each in said.values()), strict=True)
    return [next((settings for settings, filled in of_ranks if filled), of_ranks[0][0]) for of_ranks in by_group]


def _joined(tensor: SavedTensor, of_runs: Sequence[tuple[Run, Mapping[str, Tensor]]], like: Mapping[str, Any]) -> Any:
    """Return the state of a tensor; ``like``: a parameter's, as in `_Held`."""
    found: dict[str, Any] = {}
    for key, value in like.items():
        if not isinstance(value, torch.dtype):
            found[key] = value
            continue
        flat = found[key] = torch.zeros(prod(tensor.shape), dtype=value)
        for run, values in of_runs:
            if key in values:
                flat[run.offset : run.offset + run.stop - run.first] = values[key]
        found[key] = flat.view(tensor.shape)
    return found


def _form(
    wrapper: Any,
    kind: str,
    saved: Mapping[str, Any],
    tensors: Sequence[SavedTensor],
    states: Sequence[dict[str, Any]],
    settings: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a ``state_dict`` in the form of ``saved``, of tensors with these states."""
    masters: list[list[Tensor]] = [[] for _ in settings]
    groups: list[dict[str, Any]] = [{**of_group, "params": []} for of_group in settings]
    for group, before in zip(groups, groups_in(kind, saved), strict=True):
        group.update({"param_names": []} if "param_names" in before else {})
    for number, (tensor, state) in enumerate(zip(tensors, states, strict=True)):
        group = groups[tensor.group]
        group["params"].append(number)
        if "param_names" in group:
            group["param_names"] += [run.name for run in tensor.runs]
        if MASTER in state:
            masters[tensor.group].append(state.pop(MASTER))
    base = {"state": {number: state for number, state in enumerate(states) if state}, "param_groups": groups}
    if kind == PLAIN:
        return {**saved, **base}
    return with_masters(wrapper, {**saved, BASE[kind]: {**saved[BASE[kind]], **base}}, masters, tensors)
