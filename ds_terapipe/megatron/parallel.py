"""One layout of processes for DeepSpeed's pipeline and for megatron-core's tensor parallelism."""

from __future__ import annotations

from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed as dist

from ds_terapipe.errors import ConfigError
from ds_terapipe.job import Job
from ds_terapipe.process_groups import close_groups

# Megatron names the fastest axis first. This is DeepSpeed's (pipe, data, model), whose last axis is the fastest.
_ORDER = "tp-cp-ep-dp-pp"


def initialize_parallel(*, tensor: int = 1, pipeline: int = 1) -> PipeModelDataParallelTopology:
    """Set up megatron-core's groups so that they are those of DeepSpeed's topology, rank by rank.

    Every process calls it, after ``deepspeed.init_distributed``. What is left of the world is data parallel. Calling it
    again with the same sizes does nothing.

    Args:
        tensor: processes that share a layer (Megatron's ``--tensor-model-parallel-size``).
        pipeline: stages (``--pipeline-model-parallel-size``).

    Returns:
        The topology to build a ``PipelineModule`` with; rank = (stage * data + replica) * tensor + shard.

    Raises:
        ConfigError: the world is no multiple of ``tensor * pipeline``, or other sizes are in use.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call deepspeed.init_distributed() first")
    world = len(Job.current().ranks)
    if tensor < 1 or pipeline < 1 or world % (tensor * pipeline):
        raise ConfigError(
            f"tensor x pipeline parallel size: got {tensor} x {pipeline} for {world} processes, must divide their number, "
            f"start a multiple of {max(1, tensor) * max(1, pipeline)} processes"
        )
    if parallel_state.model_parallel_is_initialized():
        _check_sizes(tensor, pipeline)
    else:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            order=_ORDER,
            create_gloo_process_groups=False,
        )
    return PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=world // (tensor * pipeline))


def destroy_parallel() -> None:
    """Destroy megatron-core's groups, so that other sizes can be set up in this process; collective.

    To be called when no model is left that trains with them. megatron-core itself forgets its groups and destroys none.
    """
    made = list(parallel_state._global_process_group_list or ())  # by create_group, and None for the job's own group
    parallel_state.destroy_model_parallel()
    close_groups(made)
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup) and value in made:  # 0.16.1 forgets to forget one
            setattr(parallel_state, name, None)


def adopt_topology(topology: ProcessTopology) -> None:
    """Set up megatron-core's groups for a topology that the caller made.

    Raises:
        ConfigError: the topology orders its processes differently from megatron-core.
    """
    tensor, pipeline = max(1, topology.get_dim("model")), max(1, topology.get_dim("pipe"))
    ours = initialize_parallel(tensor=tensor, pipeline=pipeline)
    for axis in ("pipe", "data", "model"):
        lists = topology.get_axis_comm_lists(axis)
        if lists and lists != ours.get_axis_comm_lists(axis):
            raise ConfigError(
                f"topology: got axes {topology.get_axis_names()}, must order the processes by pipe, data, model, "
                "use PipeModelDataParallelTopology"
            )


def process_groups() -> ProcessGroupCollection:
    """megatron-core's groups that a Transformer layer asks for."""
    return ProcessGroupCollection(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
    )


def _check_sizes(tensor: int, pipeline: int) -> None:
    have = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if have != (tensor, pipeline):
        raise ConfigError(
            f"tensor x pipeline parallel size: got {tensor} x {pipeline}, but megatron-core is set up for {have[0]} x {have[1]}, "
            "use the same sizes or call destroy_parallel() first"
        )
