"""megatron-core's groups are those of DeepSpeed's topology, rank by rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron import destroy_parallel, initialize_parallel
from ds_terapipe.megatron.parallel import adopt_topology
from tests.spawn import run_ranks

GROUPS = {
    "model": parallel_state.get_tensor_model_parallel_group,
    "pipe": parallel_state.get_pipeline_model_parallel_group,
    "data": parallel_state.get_data_parallel_group,
}


class World:
    """A process that takes itself for one of many."""

    def enter(self, rank: int, size: int) -> None:
        self.leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    def leave(self) -> None:
        if dist.is_initialized():
            destroy_parallel()
            dist.destroy_process_group()


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.leave()


@pytest.mark.parametrize(
    ("tensor", "stages", "replicas"), [(2, 2, 1), (1, 2, 2), (2, 2, 2), (4, 1, 2), (1, 4, 1), (2, 4, 2)]
)
def test_groups_are_the_topology_s(world: World, tensor: int, stages: int, replicas: int) -> None:
    size = tensor * stages * replicas
    for rank in range(size):
        world.enter(rank, size)
        topology = initialize_parallel(tensor=tensor, pipeline=stages)
        where = topology.get_coord(rank)
        for axis, group in GROUPS.items():
            ranks = next(ranks for ranks in topology.get_axis_comm_lists(axis) if rank in ranks)
            assert dist.get_process_group_ranks(group()) == ranks, f"rank {rank}: {axis}"
        assert parallel_state.get_tensor_model_parallel_rank() == where.model
        assert parallel_state.get_pipeline_model_parallel_rank() == where.pipe
        assert parallel_state.get_data_parallel_rank() == where.data


def grid_matches(rank: int, size: int, tensor: int, stages: int) -> None:
    grid = PipelineParallelGrid(topology=initialize_parallel(tensor=tensor, pipeline=stages))
    assert grid.get_slice_parallel_rank() == parallel_state.get_tensor_model_parallel_rank()
    assert grid.get_stage_id() == parallel_state.get_pipeline_model_parallel_rank()
    assert grid.get_data_parallel_rank() == parallel_state.get_data_parallel_rank()
    pairs = [
        (grid.get_slice_parallel_group(), GROUPS["model"]()),
        (grid.get_pipe_parallel_group(), GROUPS["pipe"]()),
        (grid.get_data_parallel_group(), GROUPS["data"]()),
    ]
    for theirs, ours in pairs:
        assert dist.get_process_group_ranks(theirs) == dist.get_process_group_ranks(ours)
    destroy_parallel()


def every_grid_matches(rank: int, size: int) -> None:
    for tensor, stages in ((2, 2), (1, 2), (2, 1)):
        grid_matches(rank, size, tensor, stages)


def test_deepspeed_s_grid_agrees_in_real_processes() -> None:
    run_ranks(every_grid_matches, 4)


def test_asking_again_is_free_and_other_sizes_are_refused(world: World) -> None:
    world.enter(0, 4)
    initialize_parallel(tensor=2, pipeline=2)
    assert initialize_parallel(tensor=2, pipeline=2).get_dim("pipe") == 2
    with pytest.raises(ConfigError, match=r"got 1 x 2, but megatron-core is set up for 2 x 2"):
        initialize_parallel(tensor=1, pipeline=2)


def test_sizes_that_do_not_divide_are_refused(world: World) -> None:
    world.enter(0, 4)
    with pytest.raises(ConfigError, match=r"got 3 x 1 for 4 processes.*multiple of 3"):
        initialize_parallel(tensor=3)


def test_a_topology_in_another_order_is_refused(world: World) -> None:
    world.enter(0, 4)
    with pytest.raises(ConfigError, match="must order the processes by pipe, data, model"):
        adopt_topology(ProcessTopology(axes=["model", "data", "pipe"], dims=[2, 1, 2]))
