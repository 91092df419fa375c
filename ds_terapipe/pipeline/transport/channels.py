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


def open_channels(
    placement: Placement, pipelines: Sequence[Sequence[int]], watchdog: Watchdog, device: torch.device
) -> dict[Channel, Any]:
    """Make the process groups of this rank's channels; collective over all pipelines.

    Args:
        placement: stages on places.
        pipelines: global ranks of every pipeline of the job, by place.
        watchdog: bounds the waits; its pipeline is this rank's.
        device: device of the messages.
    """
    job, groups = watchdog.job, dict[Channel, Any]()
    peers: dict[Channel, tuple[bool, int]] = {}  # whether this rank sends, and the other rank
    for ranks in pipelines:
        for channel in channels_of(placement):
            sender, receiver = (ranks[placement.place_of(stage)] for stage in ends_of(channel))
            # a group's ranks are in the order of the boundary in both directions
            ends = [sender, receiver] if channel.forward else [receiver, sender]
            group = job.new_group(ends, watchdog.group_timeout_s)
            if job.rank in ends:
                groups[channel] = group
                peers[channel] = (True, receiver) if job.rank == sender else (False, sender)
    # one order for all ranks, so no deadlock; even boundaries first, so half of them run at once
    for channel in sorted(groups, key=lambda channel: (channel.boundary % 2, channel)):
        sends, peer = peers[channel]
        work = (dist.isend if sends else dist.irecv)(torch.zeros(1, device=device), peer, group=groups[channel])
        boundary = f"stages {channel.boundary} and {channel.boundary + 1}"
        watchdog.wait_on_host(work, f"rank {peer} to open the channel between {boundary}")
    return groups
