"""Micro-batches for a pipeline whose shape has changed, from the user's data iterators.

The ranks that read in the starting shape, those of the first and the last stage, keep reading the same micro-batches.
They send the samples to the ranks that need them now. The samples of a step, and their order, stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.batch import check_item
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.watchdog import Watchdog

_ROLES = ("inputs", "labels")


@dataclass(frozen=True)
class Ranks:
    """Ranks of a shape, with ``micro_batch`` samples in a replica's micro-batch."""

    topology: ProcessTopology
    micro_batch: int

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return max(int(self.topology.get_dim("pipe")), 1)

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return max(int(self.topology.get_dim("data")), 1)

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks of a stage."""
        return max(int(self.topology.get_dim("model")), 1)

    def rank(self, stage: int, replica: int, tensor: int) -> int:
        """Global rank."""
        where = {"pipe": stage, "data": replica, "model": tensor}
        return int(self.topology.get_rank(**{axis: where[axis] for axis in self.topology.get_axis_names()}))

    def at(self, role: str, replica: int, tensor: int) -> int:
        """Return the rank that needs a replica's inputs, or its labels."""
        return self.rank(0 if role == "inputs" else self.stages - 1, replica, tensor)


class Parcel(NamedTuple):
    """Samples ``first`` to ``stop - 1`` of a reader, for a replica; ``role``: their inputs or their labels."""

    role: str
    reader: int
    first: int
    stop: int
    replica: int


def parcels(samples: int, readers: int, replicas: int, alike: bool = False) -> list[Parcel]:
    """Return the parcels that deliver ``samples`` from the readers to the replicas.

    Each reader reads an equal part of the samples. Each replica gets an equal part, or all of them if ``alike``.
    """
    if alike:
        whole = [(reader, 0, samples // readers) for reader in range(readers)]
        return [Parcel(role, *part, replica) for role in _ROLES for replica in range(replicas) for part in whole]
    cuts = sorted(
        {samples * n // readers for n in range(readers + 1)} | {samples * n // replicas for n in range(replicas + 1)}
    )
    part, share = samples // readers, samples // replicas
    return [
        Parcel(role, first // part, first % part, first % part + stop - first, first // share)
        for role in _ROLES
        for first, stop in pairwise(cuts)
    ]


class BatchRedistributor:
    """Reads on the ranks that have an iterator, and sends the samples to the ranks that need them.

    Args:
        start: the shape that the user's iterators were made for.
        consensus: agrees that all have read before any rank sends.
        watchdog: times and bounds the waits.
    """

    def __init__(self, start: Ranks, consensus: Consensus, watchdog: Watchdog) -> None:
        self._start, self._consensus, self._watchdog = start, consensus, watchdog
        self._rank = torch.distributed.get_rank()

    @property
    def reads(self) -> bool:
        """Whether this rank had an iterator at the start."""
        where = self._start.topology.get_coord(self._rank).pipe
        return where in (0, self._start.stages - 1)

    def follow(self, micro_batch: int) -> None:
        """Set the micro-batch size of the user's iterators."""
        self._start = replace(self._start, micro_batch=micro_batch)

    def share(self, read: int, now: Ranks) -> int | None:
        """Return the micro-batches of each replica if each reader reads ``read``; None if they don't divide equally."""
        samples = read * self._start.micro_batch * self._start.replicas
        each, rest = divmod(samples, now.replicas * now.micro_batch)
        return None if rest else each

    def read(self, micro_batches: int, now: Ranks, next_batch: Callable[[], Any], alike: bool = False) -> list[Any]:
        """Return this rank's micro-batches of a step as (inputs, labels), None for unneeded ones; collective.

        Args:
            micro_batches: of each replica now.
            now: the present shape.
            next_batch: reads one of the start's micro-batches.
            alike: every replica gets all that is read, in the start's micro-batches.
        """
        start, error, mine = self._start, None, []
        samples = micro_batches * (start.micro_batch if alike else now.micro_batch * now.replicas)
        whole = alike or now.micro_batch == start.micro_batch
        try:
            if self.reads:
                mine = [next_batch() for _ in range(samples // (start.replicas * start.micro_batch))]
                _check(mine, None if whole else start.micro_batch)
        except Exception as problem:  # an error of the user's data must not leave the others waiting
            error = problem
        self._consensus.agree(error)
        got: dict[str, list[Any]] = {role: [] for role in _ROLES}
        for parcel in parcels(samples, start.replicas, now.replicas, alike):
            for tensor in range(start.tensor):
                self._hand_over(parcel, tensor, now, mine, got[parcel.role])
        inputs, labels = (got[role] if whole else list(_regrouped(got[role], now.micro_batch)) for role in _ROLES)
        count = max(len(inputs), len(labels))
        return list(zip(inputs or [None] * count, labels or [None] * count, strict=True))

    def _hand_over(self, parcel: Parcel, tensor: int, now: Ranks, mine: Sequence[Any], got: list[Any]) -> None:
        source = self._start.at(parcel.role, parcel.reader, tensor)
        target = now.at(parcel.role, parcel.replica, tensor)
        if self._rank not in (source, target):
            return
        pieces: list[Any] = []
        if self._rank == source:
            values = [item[_ROLES.index(parcel.role)] for item in mine]
            pieces = list(_cut(values, self._start.micro_batch, parcel.first, parcel.stop))
        if source == target:
            got += pieces
        elif self._rank == source:
            with self._watchdog.waiting(f"rank {target} to take {parcel.role} that were read here"):
                torch.distributed.send_object_list([_on_host(pieces)], target, group=self._consensus.group)
        else:
            box: list[Any] = [None]
            with self._watchdog.waiting(f"{parcel.role} that rank {source} reads"):
                torch.distributed.recv_object_list(box, source, group=self._consensus.group)
            got += box[0]


def _check(micro_batches: Sequence[Any], size: int | None) -> None:
    """Refuse micro-batches that cannot be sent, before any rank waits; ``size``: samples of each, if they are cut."""
    for item in micro_batches:
        check_item(item)
        for value in item[:2] if size is not None else ():
            if (got := samples_of(value)) not in (0, size):
                raise ConfigError(
                    f"the data iterator: got a micro-batch of {got} samples, must be of {size} where a reshape divides it, use "
                    "drop_last=True in the DataLoader"
                )


def _part(
    tensor: Tensor, size: int, first: int, stop: int, other: Callable[[Tensor], Any] = lambda tensor: tensor
) -> Any:
    """Return rows of a tensor of ``size`` samples; other tensors go through ``other``."""
    return tensor[first:stop] if has_samples(tensor, size) else other(tensor)


def _cut(values: Sequence[Any], size: int, first: int, stop: int) -> Iterator[Any]:
    """Yield samples ``first`` to ``stop - 1`` of micro-batches of ``size``; whole micro-batches are not copied."""
    for number, value in enumerate(values):
        begin, end = max(first - number * size, 0), min(stop - number * size, size)
        if begin < end:
            yield (
                value
                if end - begin == size
                else _map(value, functools.partial(_part, size=size, first=begin, stop=end))
            )


def _regrouped(values: Sequence[Any], size: int) -> Iterator[Any]:
    """Yield the same samples in micro-batches of ``size``."""
    rows: list[Any] = []
    for value in values:
        count = samples_of(value)
        rows += [
            _map(value, functools.partial(_part, size=count, first=n, stop=n + 1, other=_OfAll)) for n in range(count)
        ]
    for first in range(0, len(rows), size):
        yield _joined(rows[first : first + size])


class _OfAll(NamedTuple):
    """A tensor without a row for each sample: a mask for all of them."""

    tensor: Tensor


def _joined(rows: Sequence[Any]) -> Any:
    of_all = next((row for row in rows if isinstance(row, _OfAll)), None)
    if of_all is not None:
        return of_all.tensor
    if isinstance(rows[0], Tensor):
        if any(row.shape[1:] != rows[0].shape[1:] for row in rows):
            shape = list(rows[0].shape[1:])
            raise ConfigError(
                f"the data iterator: got samples of {shape} beside others in micro-batches that a reshape joins, must be "
                "of one shape, use padding or a micro-batch that divides the batch of every shape"
            )
        return torch.cat(list(rows)) if len(rows) > 1 else rows[0]
    if isinstance(rows[0], (tuple, list)):
        return tuple(_joined(column) for column in zip(*rows, strict=True))
    return rows[0]


def samples_of(value: Any) -> int:
    """Return the number of samples: the size of the first tensor's first dimension, 0 without one."""
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.dim() else 0
    return next((samples_of(item) for item in value if isinstance(item, (Tensor, tuple, list))), 0)


def has_samples(tensor: Tensor, samples: int) -> bool:
    """Whether the first dimension counts samples; a mask for all samples is sent whole."""
    return tensor.dim() > 0 and tensor.shape[0] == samples


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return tuple(_map(item, function) for item in value)
    return value


def _on_host(pieces: Sequence[Any]) -> list[Any]:
    """Copy pieces to the host, without the rest of the tensors' storage."""
    return [_map(piece, lambda tensor: tensor.detach().cpu().clone()) for piece in pieces]
