"""Shares that replicas have of a tensor, in host memory, and their sums in a bucket of bounded size.

A sum over replicas of shares that do not overlap, zeros elsewhere, is the tensor to the bit. It is made chunk by chunk,
so a device needs room for a bucket only, however large the tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from ds_terapipe.pipeline.recording.report import emit
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.process_groups import close_groups

BUCKET_BYTES = 2**25


class Share(NamedTuple):
    """A replica's share of a tensor.

    Attributes:
        values: elements of the flattened tensor [length], in host memory.
        start: first of them in the tensor.
        shape: of the tensor.
        group: group of the ranks that have the other shares; None: all elements are here.
    """

    values: Tensor
    start: int
    shape: torch.Size
    group: Any

    @property
    def nbytes(self) -> int:
        """Bytes of this share, as those of a tensor."""
        return int(self.values.nbytes)


class Bucket:
    """Memory in which replicas sum their shares.

    Args:
        memory: bytes of the bucket, on the device of the job's messages or on the host.
        everyone: group of all ranks for such messages.
        groups: on the host gloo groups of the replicas, by their ranks.
    """

    def __init__(self, memory: Tensor, everyone: Any, groups: Mapping[tuple[int, ...], Any] | None = None) -> None:
        self._memory, self._groups, self._everyone = memory, groups, everyone

    def chunks(self, share: Share) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensor, flattened, as first element and values of each chunk; collective over the replicas.

        The next chunk overwrites the values.
        """
        ranks = [] if share.group is None else torch.distributed.get_process_group_ranks(share.group)
        if len(ranks) <= 1:
            yield 0, share.values
            return
        group = share.group if self._groups is None else self._groups[tuple(ranks)]
        room, size = self._memory.view(share.values.dtype), share.shape.numel()
        for start in range(0, size, room.numel()):
            chunk = room[: min(room.numel(), size - start)].zero_()
            copy_common(chunk, start, share.values, share.start)
            torch.distributed.all_reduce(chunk, group=group)
            yield start, chunk

    def whole(self, share: Share) -> Tensor:
        """Return the tensor, in host memory; collective over the replicas."""
        found = torch.empty(share.shape.numel(), dtype=share.values.dtype)
        for start, chunk in self.chunks(share):
            copy_common(found, 0, chunk, start)
        return found.view(share.shape)

    def messages(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Yield the parts of a flat tensor in host memory, with the memory of each one's message and its group."""
        if self._groups is not None:
            yield flat, flat, self._everyone
            return
        room = self._memory.view(flat.dtype)
        for part in flat.split(room.numel()):
            yield part, room[: part.numel()], self._everyone


def copy_common(target: Tensor, at: int, source: Tensor, start: int) -> None:
    """Copy the elements that two ranges of a flat tensor have in common; ``at``, ``start``: their first ones."""
    first, stop = max(at, start), min(at + target.numel(), start + source.numel())
    if first < stop:
        target[first - at : stop - at] = source[first - start : stop - start]


@contextmanager
def new_bucket(device: torch.device, consensus: Consensus, replicas: Sequence[Sequence[int]]) -> Iterator[Bucket]:
    """Context manager with a bucket; collective. Where a device has no room for it, all ranks have theirs on the host.

    Args:
        device: the one of the job's messages.
        consensus: agreement of all ranks.
        replicas: global ranks of each group of replicas.
    """
    memory = _room(device)
    lacking = [rank for rank, has in enumerate(consensus.gather(float(memory is not None))) if not has]
    if not lacking and memory is not None:
        yield Bucket(memory, consensus.job.group)
        return
    del memory
    if consensus.job.is_first:
        emit(
            f"elastic_pipeline: rank {lacking[0]} has no {BUCKET_BYTES / 1e6:.0f} MB left on its device: masters and moments "
            "go through host memory, which takes longer"
        )
    groups = {tuple(ranks): consensus.new_group(ranks) for ranks in replicas if len(ranks) > 1}
    try:
        yield Bucket(torch.empty(BUCKET_BYTES, dtype=torch.uint8), consensus.group, groups)
    finally:
        close_groups(groups.values())


def _room(device: torch.device) -> Tensor | None:
    try:
        return torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None
