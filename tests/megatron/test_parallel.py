"""megatron-core's groups are those of DeepSpeed's topology, rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core")

from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron import destroy_parallel, initialize_parallel
from ds_terapipe.megatron.parallel import adopt_topology
from tests.megatron.common import Model, build, relative, whole_tensors
from tests.spawn import launched

THEIRS = {"model": "tensor_model_parallel", "pipe": "pipeline_model_parallel", "data": "data_parallel"}
GROUPS = {axis: getattr(parallel_state, f"get_{name}_group") for axis, name in THEIRS.items()}
RANKS = {axis: getattr(parallel_state, f"get_{name}_rank") for axis, name in THEIRS.items()}


@pytest.fixture
def enter() -> Iterator[Callable[[int, int], None]]:
    """Make this process one of many, as often as one likes."""

    def leave() -> None:
        if dist.is_initialized():
            destroy_parallel()
            dist.destroy_process_group()

    def enter(rank: int, size: int) -> None:
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield enter
    leave()


@pytest.mark.parametrize(("tensor", "stages", "replicas"), [(2, 2, 1), (1, 2, 2), (2, 2, 2), (4, 1, 2), (2, 4, 2)])
def test_groups_are_the_topology_s(enter: Callable[[int, int], None], tensor: int, stages: int, replicas: int) -> None:
    size = tensor * stages * replicas
    for rank in range(size):
        enter(rank, size)
        topology = initialize_parallel(tensor=tensor, pipeline=stages)
        for axis, group in GROUPS.items():
            ranks = next(ranks for ranks in topology.get_axis_comm_lists(axis) if rank in ranks)
            assert dist.get_process_group_ranks(group()) == ranks, f"rank {rank}: {axis}"
            assert RANKS[axis]() == getattr(topology.get_coord(rank), axis)


def real(rank: int, size: int) -> tuple[float, float]:
    """DeepSpeed's grids beside ours; how far a model's weights are from another's of the same seed, and of another seed."""
    for tensor, stages in ((2, 1), (1, 2)):
        grid = PipelineParallelGrid(topology=initialize_parallel(tensor=tensor, pipeline=stages))
        theirs = {
            "model": (grid.get_slice_parallel_group(), grid.get_slice_parallel_rank()),
            "pipe": (grid.get_pipe_parallel_group(), grid.get_stage_id()),
            "data": (grid.get_data_parallel_group(), grid.get_data_parallel_rank()),
        }
        for axis, (group, place) in theirs.items():
            assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(GROUPS[axis]())
            assert place == RANKS[axis]()
        destroy_parallel()
    key, found = "1.self_attention.linear_qkv.weight", []
    for tensor, stages, seed in ((2, 1, 1), (1, 2, 1), (1, 2, 2)):
        found.append(whole_tensors(build(Model(), tensor=tensor, stages=stages, seed=seed)))
        assert relative(found[-1]["2" + key[1:]], found[-1][key]) > 1.0, "two layers with the same weights"
        if tensor > 1:
            destroy_parallel()
    one, same, other = found
    return max(relative(same[name], weight) for name, weight in one.items()), relative(other[key], one[key])


ranks = launched(real, 2)


def test_deepspeed_s_grid_agrees_and_weights_follow_the_seed_and_no_layout(ranks: list[tuple[float, float]]) -> None:
    for same, other in ranks:
        assert same == 0.0 and other > 1.0


def test_other_sizes_are_refused(enter: Callable[[int, int], None]) -> None:
    enter(0, 4)
    with pytest.raises(ConfigError, match=r"got 3 x 1 for 4 processes.*multiple of 3"):
        initialize_parallel(tensor=3)
    with pytest.raises(ConfigError, match="must order the processes by pipe, data, model"):
        adopt_topology(ProcessTopology(axes=["model", "data", "pipe"], dims=[2, 1, 2]))
    initialize_parallel(tensor=2, pipeline=2)
    assert initialize_parallel(tensor=2, pipeline=2).get_dim("pipe") == 2
    with pytest.raises(ConfigError, match=r"got 1 x 2, but megatron-core is set up for 2 x 2"):
        initialize_parallel(tensor=1, pipeline=2)
