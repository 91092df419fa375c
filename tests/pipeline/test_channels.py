"""A group for every channel and no other; made by all, and given up together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import distributed_c10d

from ds_terapipe.pipeline.seat import Seat
from ds_terapipe.pipeline.transport.channels import Channels
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.schedule import Channel, Placement
from tests.spawn import launched

RANKS = 4
PIPELINES: dict[str, tuple[Placement, list[list[int]]]] = {
    "four stages": (Placement.plain(4), [[0, 1, 2, 3]]),
    "two pipelines": (Placement.plain(2), [[0, 2], [1, 3]]),
    "two stages on a place": (Placement.of([0, 0, 1, 1]), [[0, 1], [2, 3]]),
    "there and back": (Placement.of([0, 1, 0]), [[0, 1], [2, 3]]),
    "the first only go forward": (Placement.plain(4, forward_only=2), [[0, 1, 2, 3]]),
}


def groups() -> int:
    """Process groups that this rank is in."""
    return len(distributed_c10d._world.pg_map)


def members(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def open_and_close(rank: int, world_size: int) -> dict[str, tuple[dict[Channel, tuple[int, ...]], int]]:
    found = {}
    for name, (placement, pipelines) in PIPELINES.items():
        before = groups()
        watchdog = Watchdog(Seat.of(placement, rank, pipelines), timeout_s=60.0)
        channels = Channels(placement, pipelines, watchdog, torch.device("cpu"))
        made = {channel: members(group) for channel, group in channels._groups.items()}
        assert groups() == before + len(made) == before + len(channels)
        channels.close()
        channels.close()
        found[name] = made, groups() - before
        watchdog.close()
    return found


opened = launched(open_and_close, RANKS)


def wanted(placement: Placement, ranks: Sequence[int], rank: int) -> dict[Channel, tuple[int, ...]]:
    places = [ranks[stage.place] for stage in placement.stages]
    return {
        Channel(boundary, forward): tuple(sorted(pair))
        for boundary, pair in enumerate(pairwise(places))
        for forward in (True, False)
        if rank in pair and pair[0] != pair[1] and (forward or boundary >= placement.forward_only)
    }


@pytest.mark.parametrize("name", PIPELINES)
def test_every_rank_has_the_groups_of_its_own_channels(opened, name):
    placement, pipelines = PIPELINES[name]
    for rank, found in enumerate(opened):
        made, left = found[name]
        mine = next(ranks for ranks in pipelines if rank in ranks)
        assert made == wanted(placement, mine, rank) and left == 0
    everyone = {(channel, group) for rank in pipelines[0] for channel, group in opened[rank][name][0].items()}
    boundaries = sum(placement.sends_forward(stage) for stage in range(len(placement.stages)))
    assert len(everyone) == 2 * boundaries - placement.forward_only
