"""End of an engine: everything that DeepSpeed's engine, ``PipelineModule`` and grid made and leave behind.

DeepSpeed makes a process group for every axis of the topology and for every tied layer, and never destroys them. Here
they belong to the module, and the module ends with its engine: ``engine.destroy()`` closes both, and a closed module is
refused. A garbage collector would destroy them at another time on every rank, but on NCCL the ranks of a group must
destroy it together. Therefore an engine that is collected without a ``destroy()`` leaves its groups.
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
    """Return the process groups of a ``PipelineModule``'s grid and tied layers that include this rank."""
    made = [vars(module._grid).get(name) for name in _OF_GRID] + [tied["group"] for tied in module.tied_comms.values()]
    return {group for group in made if isinstance(group, ProcessGroup)}


def close_engine(engine: Any) -> None:
    """Close the process groups of a ``TokenPipelineEngine``, its runtime and its module; collective."""
    with engine._watchdog.waiting("all ranks to close their process groups"):
        engine._runtime.close()
        close_groups([engine._consensus.group], engine._consensus)
        _close_module(engine.module, engine, engine.optimizer)


def _close_module(module: PipelineModule, *holders: Any) -> None:
    """Close a module's groups, those of its shape and its own of all ranks; it cannot train any more. Idempotent."""
    groups = shape_groups(module) | {vars(module).get("world_group")}
    close_groups(groups, module, module._grid, *module.parameters(), *holders)
    module.tied_comms.clear()
    if deepspeed_groups.mpu is module._grid:  # else DeepSpeed would ask it for groups of any engine
        deepspeed_groups.mpu = None


def check_open(model: object) -> None:
    """Refuse a module that was closed with its engine.

    Raises:
        ConfigError: its process groups are closed.
    """
    if isinstance(model, PipelineModule) and "world_group" not in vars(model):
        raise ConfigError(
            "model: got a PipelineModule whose engine was destroyed, must be built again, use PipelineModule(...) again and "
            "load its weights"
        )


def remove_hooks(engine: Any) -> None:
    """Remove a DeepSpeed engine's hooks from its module and optimizer."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        hook = vars(engine).get(name)
        if hook is not None:
            hook.remove()
    unregister = getattr(engine.optimizer, "unregister_grad_acc_post_hooks", None)  # ZeRO's, bf16's
    if unregister is not None:
        unregister()


def detach_engine(engine: Any) -> None:
    """Release objects that keep a DeepSpeed engine alive, or outlive it; local.

    These are its hooks, its data iterator (workers and shared memory), and the writer of its TensorBoard events (a
    thread and a file).
    """
    remove_hooks(engine)
    engine.data_iterator = engine.training_dataloader = None
    writer = getattr(getattr(engine.monitor, "tb_monitor", None), "summary_writer", None)
    if writer is not None:
        writer.close()
