"""Micro-batches for a pipeline whose shape has changed, from the user's data iterators.

The ranks that read in the starting shape, those of the first and the last stage, keep reading the same micro-batches.
They send the samples to the ranks that need them now. The samples of a step, and their order, stay the same.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.batch import check_item, read_items

_ROLES = ("inputs", "labels")
_PLAIN = (str, bytes, numbers.Number)


@dataclass(frozen=True)
class Ranks:
    """Ranks of a shape, with ``micro_batch`` samples in a replica's micro-batch.

    ``rank``: this process; ``ends``: places of the model's first and last stage.
    """

    topology: ProcessTopology
    micro_batch: int
    rank: int
    ends: tuple[int, int]

    @classmethod
    def of(cls, engine: Any) -> Ranks:
        """Return the ranks of an engine's present shape."""
        places = ModelChunks(engine.module).places
        return cls(engine.module._topo, engine.micro_batch_size, engine.global_rank, (places[0], places[-1]))

    @property
    def read_here(self) -> bool:
        """Whether this process has an iterator in this shape."""
        return self.topology.get_coord(self.rank).pipe in self.ends

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return max(int(self.topology.get_dim("data")), 1)

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks of a stage."""
        return max(int(self.topology.get_dim("model")), 1)

    def at(self, role: str, replica: int, tensor: int) -> int:
        """Return the global rank that needs a replica's inputs, or its labels."""
        where = {"pipe": self.ends[role != "inputs"], "data": replica, "model": tensor}
        return int(self.topology.get_rank(**{axis: where[axis] for axis in self.topology.get_axis_names()}))


class Parcel(NamedTuple):
    """Units ``first`` to ``stop - 1`` of a reader, for a replica."""

    reader: int
    first: int
    stop: int
    replica: int


def parcels(units: int, readers: int, replicas: int, alike: bool = False) -> list[Parcel]:
    """Return the parcels that deliver ``units``, samples or micro-batches, from the readers to the replicas.

    Each reader reads an equal part of them. Each replica gets an equal part, or all of them if ``alike``.
    """
    part, share = units // readers, units // replicas
    if alike:
        return [Parcel(reader, 0, part, replica) for replica in range(replicas) for reader in range(readers)]
    cuts = sorted({*range(0, units + 1, part), *range(0, units + 1, share)})
    return [
        Parcel(first // part, first % part, first % part + stop - first, first // share)
        for first, stop in pairwise(cuts)
    ]


def redistributed(
    engine: Any, start: Ranks, micro_batches: int, next_batch: Callable[[], Any], alike: bool = False
) -> list[Any]:
    """Return this rank's micro-batches of a step as (inputs, labels), None for unneeded ones; collective.

    Args:
        engine: in its present shape.
        start: the shape that the user's iterators were made for.
        micro_batches: of each replica now.
        next_batch: reads one of the start's micro-batches.
        alike: every replica gets all that is read, in the start's micro-batches.
    """
    now, error, mine = Ranks.of(engine), None, []
    samples = micro_batches * (start.micro_batch if alike else now.micro_batch * now.replicas)
    whole = alike or now.micro_batch == start.micro_batch
    try:
        if start.read_here:
            mine = read_items(next_batch, samples // (start.replicas * start.micro_batch))
            _check(mine, None if whole else start.micro_batch)
    except Exception as problem:  # an error of the user's data must not leave the others waiting
        error = problem
    engine._consensus.agree(error)
    # micro-batches are handed over, or single samples where their size has changed
    units = samples // start.micro_batch if whole else samples
    columns: list[list[Any]] = []
    for number, role in enumerate(_ROLES):
        read, got = [item[number] for item in mine], list[Any]()
        if not whole:
            read = [row for value in read for row in _rows(value, start.micro_batch)]
        for reader, first, stop, replica in parcels(units, start.replicas, now.replicas, alike):
            for tensor in range(start.tensor):
                source, target = start.at(role, reader, tensor), now.at(role, replica, tensor)
                got += _handed_over(engine, role, source, target, read[first:stop])
        columns.append(got if whole else _regrouped(got, now.micro_batch))
    count = max(map(len, columns))
    return list(zip(*(column or [None] * count for column in columns), strict=True))


def _handed_over(engine: Any, role: str, source: int, target: int, units: Sequence[Any]) -> Sequence[Any]:
    """Return what this rank gets of the units of a source for a target."""
    if engine.global_rank not in (source, target):
        return ()
    if source == target:
        return units
    group = engine._consensus.group
    if engine.global_rank == source:
        with engine._watchdog.waiting(f"rank {target} to take {role} that were read here"):
            torch.distributed.send_object_list([[_map(each, _on_host) for each in units]], target, group=group)
        return ()
    box: list[Any] = [None]
    with engine._watchdog.waiting(f"{role} that rank {source} reads"):
        torch.distributed.recv_object_list(box, source, group=group)
    received: list[Any] = box[0]
    return received


def _check(micro_batches: Sequence[Any], size: int | None) -> None:
    """Refuse micro-batches that cannot be sent, before any rank waits; ``size``: samples of each, if they are cut."""
    for item in micro_batches:
        check_item(item)
        for value in item[:2] if size is not None else ():
            for other in _others(value):
                raise ConfigError(
                    f"the data iterator: got a {type(other).__name__} in a micro-batch, must be tensors, texts and numbers, in "
                    "lists, tuples or dicts where a reshape divides it, use a dict"
                )
            if (got := samples_of(value)) not in (0, size):
                raise ConfigError(
                    f"the data iterator: got a micro-batch of {got} samples, must be of {size} where a reshape divides it, use "
                    "drop_last=True in the DataLoader"
                )


def _rows(value: Any, size: int) -> list[Any]:
    """Return the samples of a micro-batch of ``size``, as micro-batches of one."""

    def part(row: int) -> Callable[[Any], Any]:
        return lambda leaf: leaf[row : row + 1] if has_samples(leaf, size) else _OfAll(leaf)

    return [_map(value, part(row)) for row in range(size)]


def _regrouped(rows: Sequence[Any], size: int) -> list[Any]:
    """Join samples to micro-batches of ``size``."""
    return [_joined(rows[first : first + size]) for first in range(0, len(rows), size)]


class _OfAll(NamedTuple):
    """A leaf without a part for each sample: a mask for all of them."""

    leaf: Any


def _is_list(value: Any) -> bool:
    """Whether a value is texts or numbers, of which a collated micro-batch has one for each sample."""
    several = isinstance(value, (list, tuple)) and len(value) > 0 and not hasattr(value, "_fields")
    return several and all(isinstance(each, _PLAIN) or _is_number(each) for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _entries(value: Any) -> Sequence[Any]:
    return tuple(value.values()) if isinstance(value, Mapping) else value


def _others(value: Any) -> Iterator[Any]:
    """Yield what is neither a tensor, text or number nor a list, tuple or dict, and so cannot be divided."""
    if isinstance(value, (Mapping, tuple, list)):
        for each in _entries(value):
            yield from _others(each)
    elif not isinstance(value, (Tensor, type(None), *_PLAIN)):
        yield value


def _with(value: Any, items: Iterable[Any]) -> Any:
    """Return a list, tuple or dict of the same type with other items."""
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)
        for key, item in zip(value, items, strict=True):
            copied[key] = item
        return copied
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _joined(rows: Sequence[Any]) -> Any:
    of_all = next((row for row in rows if isinstance(row, _OfAll)), None)
    if of_all is not None:
        return of_all.leaf
    if _is_list(rows[0]):
        return _with(rows[0], (each for row in rows for each in row))
    if isinstance(rows[0], Mapping):
        return _with(rows[0], (_joined([row[key] for row in rows]) for key in rows[0]))
    if isinstance(rows[0], Tensor):
        if any(row.shape[1:] != rows[0].shape[1:] for row in rows):
            shape = list(rows[0].shape[1:])
            raise ConfigError(
                f"the data iterator: got samples of {shape} beside others in micro-batches that a reshape joins, must be "
                "of one shape, use padding or a micro-batch that divides the batch of every shape"
            )
        return torch.cat(list(rows)) if len(rows) > 1 else rows[0]
    if isinstance(rows[0], (tuple, list)):
        return _with(rows[0], (_joined(column) for column in zip(*rows, strict=True)))
    return rows[0]


def samples_of(value: Any) -> int:
    """Return the number of samples: the size of the first tensor's first dimension, 0 without one."""
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.dim() else 0
    items = _entries(value) if isinstance(value, (Mapping, tuple, list)) else ()
    return next((samples_of(item) for item in items if isinstance(item, (Tensor, tuple, list, Mapping))), 0)


def has_samples(leaf: Any, samples: int) -> bool:
    """Whether the first dimension of a tensor, or a list, counts samples; a mask for all samples is sent whole."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.shape[0] == samples
    return len(leaf) == samples


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to each tensor, and to each list of texts or numbers."""
    if isinstance(value, Tensor) or _is_list(value):
        return function(value)
    if isinstance(value, (Mapping, tuple, list)):
        return _with(value, (_map(item, function) for item in _entries(value)))
    return value


def _on_host(leaf: Any) -> Any:
    """Copy a tensor to the host, without the rest of the storage."""
    if isinstance(leaf, (list, tuple)):
        return _with(leaf, map(_on_host, leaf))
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf
