"""A group for every channel and no other; made by all, and given up together."""

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import distributed_c10d

from ds_terapipe.job import Job, error_of
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.transport.channels import open_channels
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.process_groups import close_groups
from ds_terapipe.schedule import Channel, Placement
from tests.spawn import launched

PLACED: dict[str, tuple[Placement, list[list[int]]]] = {
    "four stages": (Placement.plain(4), [[0, 1, 2, 3]]),
    "two pipelines": (Placement.plain(2), [[0, 2], [1, 3]]),
    "there and back": (Placement.of([0, 1, 0]), [[0, 1], [2, 3]]),
    "the first only go forward": (Placement.plain(4, forward_only=2), [[0, 1, 2, 3]]),
}


def open_and_close(rank: int, world_size: int) -> dict[str, Any]:
    """The members of each channel's group of this rank, and how many groups are left."""
    found, groups, members = {}, distributed_c10d._world.pg_map, torch.distributed.get_process_group_ranks
    for name, (placement, pipelines) in PLACED.items():
        before = len(groups)
        watchdog = Watchdog(RankView.of(placement, rank, pipelines), timeout_s=60.0)
        channels = open_channels(placement, pipelines, watchdog, torch.device("cpu"))
        made = {channel: tuple(members(group)) for channel, group in channels.items()}
        assert len(groups) == before + len(made)
        for _ in range(2):  # closed ones are skipped
            close_groups(channels.values())
        found[name] = made, len(groups) - before
        watchdog.close()
    found["two jobs"] = two_jobs(rank)
    return found


def two_jobs(rank: int) -> list[Any]:
    """Agree within each half of the launch at the same time, in rounds of its own; return the results of this half."""
    job = Job([0, 1] if rank < 2 else [2, 3])
    watchdog = Watchdog(None, 60.0, job=job)
    watchdog._publish()
    consensus = Consensus(watchdog)
    rounds = [consensus.decide(lambda: rank) for _ in range(3 + rank // 2 * 20)]
    error = error_of(lambda: consensus.agree(KeyError("x") if rank == 3 else None))
    others, until = list[int](), time.monotonic() + 30.0
    while not others and time.monotonic() < until:  # a position is written without waiting, and read before its rank closes
        others = sorted(watchdog._positions.of_others() or {})
    told = [job.together(lambda: rank), consensus.gather(rank), str(error)]
    watchdog.close()
    close_groups([consensus.group, job.group])
    return [{*rounds}, *told, others]


opened = launched(open_and_close, 4)


@pytest.mark.parametrize("name", PLACED)
def test_every_rank_has_the_groups_of_its_own_channels(opened, name):
    placement, pipelines = PLACED[name]
    for rank, found in enumerate(opened):
        mine = next(ranks for ranks in pipelines if rank in ranks)
        pairs = [tuple(sorted(pair)) for pair in pairwise(mine[stage.place] for stage in placement.stages)]
        wanted = {
            Channel(boundary, forward): pair
            for boundary, pair in enumerate(pairs)
            for forward in (True, False)
            if rank in pair and len({*pair}) == 2 and (forward or boundary >= placement.forward_only)
        }
        assert found[name] == (wanted, 0)


def test_two_jobs_of_one_launch_agree_at_the_same_time(opened):
    """None knows of the other: decisions, numbers, errors and positions are those of its own ranks."""
    for rank, found in enumerate(opened):
        first, other = rank // 2 * 2, rank ^ 1
        error = ("None", "None", "rank 3 failed: KeyError: 'x'", "'x'")[rank]
        assert found["two jobs"] == [{first}, rank, [first, first + 1], error, [other]]
