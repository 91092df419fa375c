"""The process groups that messages travel in: one of two ranks for each boundary of consecutive stages and direction.

On NCCL a group runs its messages one behind the other in the order of their issue, each until its peer joins (PyTorch says
so itself of unbatched sends and receives in a group that is bound to a device, which DeepSpeed's are). A group that carried
two channels could hold a send behind a receive that waits for it; see ``schedule/streams.py``, which replays that. All groups
are made together, by all ranks in one order, and each is used once before the first step: a communicator that came to be with
its first message would hold the sender's host until the receiver comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed
from deepspeed import comm as dist

from ds_terapipe.pipeline.watch import Watch, bounded_group
from ds_terapipe.schedule import Channel


class Channels:
    """The groups of this rank's channels, at most four.

    Args:
        pipelines: global ranks of every pipeline of the job, by stage; collective over all of them.
        watch: bounds the waits; its pipeline is this rank's.
        device: where messages live.

    Stages that follow each other on one rank have no channel.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], watch: Watch, device: torch.device) -> None:
        rank = torch.distributed.get_rank()
        self._groups: dict[Channel, Any] = {}
        mine: list[tuple[int, int, int]] = []
        for ranks in pipelines:
            for boundary, (before, after) in enumerate(pairwise(ranks)):
                if before == after:
                    continue
                for forward in (True, False):
                    group = bounded_group([before, after], watch.group_timeout_s)
                    if rank in (before, after):
                        self._groups[Channel(boundary, forward)] = group
                if rank in (before, after):
                    mine.append((boundary, before, after))
        # Boundaries of even number first: of the two that a rank has one is even, so nobody waits in a circle.
        for boundary, before, after in sorted(mine, key=lambda each: (each[0] % 2, each[0])):
            self._touch(boundary, before, after, watch, device)

    def _touch(self, boundary: int, before: int, after: int, watch: Watch, device: torch.device) -> None:
        rank, token = torch.distributed.get_rank(), torch.zeros(1, device=device)
        for forward in (True, False):
            group, sends = self._groups[Channel(boundary, forward)], (rank == before) == forward
            peer = after if rank == before else before
            work = (dist.isend if sends else dist.irecv)(token, peer, group=group)
            watch.wait_on_host(work, f"rank {peer} to open the channel between stages {boundary} and {boundary + 1}")

    def __getitem__(self, channel: Channel) -> Any:
        """The group of one of this rank's channels."""
        return self._groups[channel]

    def __len__(self) -> int:
        return len(self._groups)

    def close(self) -> None:
        """Give the groups up; collective over each group's two ranks. Does nothing when there is no job any more."""
        groups, self._groups = self._groups, {}
        if torch.distributed.is_initialized():
            for group in groups.values():
                torch.distributed.destroy_process_group(group)
