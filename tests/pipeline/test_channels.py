"""A group for every channel and no other; made by all, and given up together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import distributed_c10d

from ds_terapipe.pipeline.channels import Channels
from ds_terapipe.pipeline.watch import Watch
from ds_terapipe.schedule import Channel
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine
from tests.spawn import run_ranks

RANKS = 4
PIPELINES: dict[str, list[list[int]]] = {
    "four stages": [[0, 1, 2, 3]],
    "two pipelines": [[0, 2], [1, 3]],
    "two stages on a place": [[0, 0, 1, 1], [2, 2, 3, 3]],
}


def groups() -> int:
    """Process groups that this rank is in."""
    return len(distributed_c10d._world.pg_map)


def members(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def open_and_close(rank: int, world_size: int) -> dict[str, tuple[dict[Channel, tuple[int, ...]], int]]:
    found = {}
    for name, pipelines in PIPELINES.items():
        before = groups()
        mine = next(ranks for ranks in pipelines if rank in ranks)
        watch = Watch(mine, mine.index(rank), timeout_s=60.0)
        channels = Channels(pipelines, watch, torch.device("cpu"))
        made = {channel: members(group) for channel, group in channels._groups.items()}
        assert groups() == before + len(made) == before + len(channels)
        channels.close()
        channels.close()
        found[name] = made, groups() - before
        watch.close()
    return found


def an_engine_comes_and_goes(rank: int, world_size: int) -> list[int]:
    counts = []
    for _ in range(2):
        before = groups()
        engine = build_engine(gpt(4), mean_loss, stages=world_size, token_pipeline={"slices": 2})
        engine.train_batch(iter([micro_batch(m, masked=False) for m in range(2)]))
        held = groups()
        engine.destroy()
        counts.append(held - groups())
        assert held > before
    return counts


@pytest.fixture(scope="module")
def opened() -> list[dict[str, tuple[dict[Channel, tuple[int, ...]], int]]]:
    return run_ranks(open_and_close, RANKS)


def wanted(ranks: Sequence[int], rank: int) -> dict[Channel, tuple[int, ...]]:
    return {
        Channel(boundary, forward): tuple(sorted(ranks[boundary : boundary + 2]))
        for boundary in range(len(ranks) - 1)
        for forward in (True, False)
        if rank in ranks[boundary : boundary + 2] and ranks[boundary] != ranks[boundary + 1]
    }


@pytest.mark.parametrize("name", PIPELINES)
def test_every_rank_has_the_groups_of_its_own_channels(opened, name):
    for rank, found in enumerate(opened):
        made, left = found[name]
        mine = next(ranks for ranks in PIPELINES[name] if rank in ranks)
        assert made == wanted(mine, rank) and left == 0
    pipeline = PIPELINES[name][0]
    everyone = {(channel, group) for rank in pipeline for channel, group in opened[rank][name][0].items()}
    assert len(everyone) == 2 * (len(set(pipeline)) - 1)


def test_destroy_gives_up_the_groups_of_an_engines_channels():
    for rank, counts in enumerate(run_ranks(an_engine_comes_and_goes, 3)):
        assert counts == [4 if rank == 1 else 2] * 2
