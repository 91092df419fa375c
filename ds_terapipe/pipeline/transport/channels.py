"""Process groups of messages: one of two ranks for each boundary of consecutive stages and direction.

On NCCL a group runs its messages in the order of their issue, each until its peer joins. PyTorch documents this for
unbatched messages in a group that is bound to a device, as DeepSpeed's are. A group with two channels could queue a
send behind a receive that waits for it; see ``schedule/channels.py``. All ranks make all groups
together, in one order, and each is used once before the first step. A communicator made by its first message would
block the sender's host until the receiver arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.process_groups import close_groups
from ds_terapipe.schedule import Channel, Placement


def channels_of(placement: Placement) -> list[Channel]:
    """Return all channels of a placement: none between stages on one place, none back to a forward-only stage."""
    boundaries = [stage for stage in range(len(placement.stages)) if placement.sends_forward(stage)]
    forward = [Channel(boundary, True) for boundary in boundaries]
    return forward + [Channel(boundary, False) for boundary in boundaries if placement.receives_backward(boundary)]


def ends_of(channel: Channel) -> tuple[int, int]:
    """Return the stages that send and receive on a channel."""
    before, after = channel.boundary, channel.boundary + 1
    return (before, after) if channel.forward else (after, before)


class Channels:
    """Process groups of this rank's channels.

    Args:
        placement: stages on places.
        pipelines: global ranks of every pipeline of the job, by place; collective over all of them.
        watchdog: bounds the waits; its pipeline is this rank's.
        device: device of the messages.
    """

    def __init__(
        self, placement: Placement, pipelines: Sequence[Sequence[int]], watchdog: Watchdog, device: torch.device
    ) -> None:
        job = watchdog.job
        self._groups: dict[Channel, Any] = {}
        mine: list[tuple[Channel, int, int]] = []
        for ranks in pipelines:
            for channel in channels_of(placement):
                sender, receiver = (ranks[placement.place_of(stage)] for stage in ends_of(channel))
                # a group's ranks are in the order of the boundary in both directions
                group = job.new_group(
                    [sender, receiver] if channel.forward else [receiver, sender], watchdog.group_timeout_s
                )
                if job.rank in (sender, receiver):
                    self._groups[channel] = group
                    mine.append((channel, sender, receiver))
        # one order for all ranks, so no deadlock; even boundaries first, so half of them run at once
        for channel, sender, receiver in sorted(mine, key=lambda each: (each[0].boundary % 2, each[0])):
            self._touch(channel, sender, receiver, watchdog, device)

    def _touch(self, channel: Channel, sender: int, receiver: int, watchdog: Watchdog, device: torch.device) -> None:
        sends, group = watchdog.job.rank == sender, self._groups[channel]
        peer = receiver if sends else sender
        work = (dist.isend if sends else dist.irecv)(torch.zeros(1, device=device), peer, group=group)
        boundary = f"stages {channel.boundary} and {channel.boundary + 1}"
        watchdog.wait_on_host(work, f"rank {peer} to open the channel between {boundary}")

    def __getitem__(self, channel: Channel) -> Any:
        """Return the group of one of this rank's channels."""
        return self._groups[channel]

    def __len__(self) -> int:
        return len(self._groups)

    def close(self) -> None:
        """Destroy the groups; collective over each group's two ranks. Does nothing after the job's end."""
        groups, self._groups = self._groups, {}
        close_groups(groups.values())
