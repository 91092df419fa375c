"""Hooks of DeepSpeed's engine that tell ``FusedLamb`` about the whole model: groups, skipped steps, norms, names.

Read: DeepSpeed 0.19.8, ``runtime/engine.py``, ``runtime/bf16_optimizer.py``, ``runtime/zero/stage_1_and_2.py``,
``runtime/fp16/unfused_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import BackwardPass
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_world_size

from ds_terapipe.bf16_parts import load_with_parts
from ds_terapipe.clipping import clip_by_true_norm, counting_nothing
from ds_terapipe.errors import ConfigError
from ds_terapipe.job import Job
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.overrides import override
from ds_terapipe.parameter_marks import count_untied


def _hook_engine(engine: Any) -> None:
    """Override what an engine does wrong with a ``FusedLamb``: its norm, a scaled loss, and reading a bf16 pipeline's parts."""
    clip_by_true_norm(engine)
    if not getattr(engine, "loads_parts", False):  # our pipeline engines do, with every optimizer
        override(engine, "load_checkpoint", load_with_parts)
    if not isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        return
    override(engine, "backward", _backward)
    if isinstance(engine, PipelineEngine):
        # A pipeline's backward pass goes past `backward`, and is looked up in this map.
        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardPass: _backward_of_a_scaled_loss}


def _backward(engine: Any, backward: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
    """Scale the loss; DeepSpeed 0.19.8 only divides fp16 gradients without ZeRO."""
    scale = engine.optimizer.loss_scale
    return backward(loss.float() * scale, *args, **kwargs) / scale


def _backward_of_a_scaled_loss(engine: Any, buffer_id: int) -> None:
    if not engine.is_last_stage():
        engine._exec_backward_pass(buffer_id)
        return
    loss = engine.loss
    engine.loss = loss.float() * engine.optimizer.loss_scale
    try:
        engine._exec_backward_pass(buffer_id)
    finally:
        engine.loss = loss


def set_groups(optimizer: FusedLamb, model: Any, mpu: Any, config: Mapping[str, Any]) -> None:
    """Tell the optimizer which ranks hold parts of the same model. Before DeepSpeed's own wrapper is made around it.

    Args:
        optimizer: of the model's parameters.
        model: the argument of ``deepspeed.initialize``.
        mpu: Megatron's, where the model is no pipeline; None for a model that is whole on every rank.
        config: the DeepSpeed configuration.
    """
    pipeline = isinstance(model, PipelineModule)
    grid = model.mpu() if pipeline else mpu
    tensor_group = None
    if grid is not None and bwc_tensor_model_parallel_world_size(grid) > 1:
        tensor_group = bwc_tensor_model_parallel_group(grid)
    if is_sharded(config, pipeline):
        norm_group = Job.current().group
    else:
        norm_group = None if grid is None else grid.get_model_parallel_group()
    tied = dict(model.get_tied_weights_and_groups()) if pipeline else {}
    if pipeline:
        count_untied(model)
    optimizer.set_groups(tensor_group, norm_group, tied)


def is_sharded(config: Mapping[str, Any], pipeline: bool) -> bool:
    """Whether DeepSpeed shares the parameters of a layer out among replicas: with ZeRO, and for bf16 under a pipeline."""
    bf16 = config.get("bf16") or config.get("bfloat16")
    zero = config.get("zero_optimization")
    staged = isinstance(zero, Mapping) and bool(zero.get("stage", 0))
    return staged or (pipeline and isinstance(bf16, Mapping) and bool(bf16.get("enabled")))


def attach_optimizer(engine: Any) -> None:
    """Make an engine that was built on a ``FusedLamb`` clip, skip, name and report right. Collective over the model's ranks.

    Raises:
        ConfigError: for a model with experts, or stages with different numbers of parameter groups under ZeRO.
    """
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    if engine.has_moe_layers:
        raise ConfigError(
            "optimizer.type: got FusedLamb for a model with experts, must be one without (their norms are on other ranks), "
            "use another optimizer"
        )
    _hook_engine(engine)
    engine.client_optimizer = optimizer  # DeepSpeed names the optimizer after its class: not that of a callable
    if wrapper is optimizer:
        _tell_skipped_steps(optimizer)
    else:
        # The wrappers look for nan and inf themselves, on all ranks, and step for all groups or for none.
        optimizer.check_gradients = False
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        wrapper.check_grad_overflow = True  # by default it clips a nan in bf16 to steps of zero
        _check_group_counts(engine, optimizer)
        for group in optimizer.param_groups:
            group.setdefault("step", 0)  # elastic checkpoints want one; the numbers that count are in the state
    if isinstance(wrapper, BF16_Optimizer):
        counting_nothing(wrapper)
    optimizer.set_names({parameter: name for name, parameter in engine.module.named_parameters()})
    if hasattr(engine, "on_reshape"):
        engine.on_reshape(_follow)
    if optimizer.monitor_interval and engine.global_rank == 0 and engine.monitor.enabled:
        optimizer.set_monitor(engine.monitor.write_events)


def _follow(engine: Any) -> None:
    """Tell the optimizer of a pipeline that was reshaped where layers, and copies of tied ones, are now."""
    set_groups(engine.basic_optimizer, engine.module, engine.mpu, engine._config._param_dict)
    engine.basic_optimizer.set_names({parameter: name for name, parameter in engine.module.named_parameters()})


def _tell_skipped_steps(optimizer: FusedLamb) -> None:
    """Keep ``optimizer.overflow``, by which the engine counts a skipped step and does not advance the LR scheduler."""
    noted = optimizer.skipped_steps
    vars(optimizer)["overflow"] = False

    def note(stepped: Any, args: Any, kwargs: Any) -> None:
        nonlocal noted
        skipped = stepped.skipped_steps
        stepped.overflow = skipped > noted
        noted = skipped

    optimizer.register_step_post_hook(note)


def _check_group_counts(engine: Any, optimizer: FusedLamb) -> None:
    """ZeRO steps, and takes norms, one parameter group after the other: stages with fewer would leave the others waiting."""
    if engine.mpu is None:
        return
    count = len(optimizer.param_groups)
    least_and_most = torch.tensor([-count, count], device=engine.device)
    dist.all_reduce(least_and_most, op=dist.ReduceOp.MAX, group=engine.mpu.get_model_parallel_group())
    least, most = -int(least_and_most[0]), int(least_and_most[1])
    if least != most:
        raise ConfigError(
            f"zero_optimization.stage: got parameter groups whose number differs between pipeline stages ({least} to {most}, "
            "empty ones not counted), must be the same with ZeRO, use groups with parameters on every stage, or stage 0"
        )
