"""How an engine goes: what DeepSpeed's engine, ``PipelineModule`` and grid made, and leave behind.

DeepSpeed makes a process group for every axis of the topology and for every tied layer, and nobody destroys them. Here they
belong to the module, and the module ends with its engine: ``engine.destroy()`` closes both, and a module that was closed is
refused. Left to the garbage collector they would go at another time on every rank, while on NCCL the ranks of a group have to
destroy it together. For the same reason an engine that is collected without a ``destroy()`` leaves its groups where they are.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups as deepspeed_groups
from torch.distributed import ProcessGroup

from ds_terapipe.errors import ConfigError
from ds_terapipe.process_groups import close_groups

_OF_GRID = ("ds_model_proc_group", "dp_proc_group", "pp_proc_group", "slice_proc_group")


def shape_groups(module: PipelineModule) -> set[ProcessGroup]:
    """The process groups of a ``PipelineModule``'s grid and tied layers: of those that this rank is in."""
    made = [vars(module._grid).get(name) for name in _OF_GRID] + [tied["group"] for tied in module.tied_comms.values()]
    return {group for group in made if isinstance(group, ProcessGroup)}


def module_groups(module: PipelineModule) -> set[ProcessGroup]:
    """All process groups that a ``PipelineModule`` made: those of its shape, and its own of all ranks."""
    world = module.__dict__.get("world_group")
    return shape_groups(module) | ({world} if isinstance(world, ProcessGroup) else set())


def close_module(module: PipelineModule, *holders: Any) -> None:
    """:func:`close_groups` of a ``PipelineModule``, which can train no more then; a second call does nothing."""
    close_groups(module_groups(module), module, module._grid, *module.parameters(), *holders)
    module.tied_comms.clear()
    if deepspeed_groups.mpu is module._grid:  # else DeepSpeed would ask it for groups, for any engine
        deepspeed_groups.mpu = None


def check_open(model: object) -> None:
    """Refuse a module that ended with its engine.

    Raises:
        ConfigError: it has no process groups any more.
    """
    if isinstance(model, PipelineModule) and "world_group" not in vars(model):
        raise ConfigError(
            "model: got a PipelineModule whose engine was destroyed, must be built anew, use PipelineModule(...) again and "
            "load its weights"
        )


def remove_hooks(engine: Any) -> None:
    """Take a DeepSpeed engine's hooks from its module and optimizer."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        hook = vars(engine).get(name)
        if hook is not None:
            hook.remove()
    unregister = getattr(engine.optimizer, "unregister_grad_acc_post_hooks", None)  # ZeRO's, bf16's
    if unregister is not None:
        unregister()


def detach_engine(engine: Any) -> None:
    """Take away what keeps a DeepSpeed engine alive, or lives on without it; of this process alone.

    That is its hooks, the iterator over its training data (processes and shared memory, where there are workers), and the
    writer of its TensorBoard events (a thread and a file).
    """
    remove_hooks(engine)
    engine.data_iterator = engine.training_dataloader = None
    writer = getattr(getattr(engine.monitor, "tb_monitor", None), "summary_writer", None)
    if writer is not None:
        writer.close()
