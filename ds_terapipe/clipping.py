"""The true norm of all gradients of a model that is spread over pipeline stages and tensor-parallel ranks.

DeepSpeed 0.19.8 gets it wrong in two places: its fp32 engines count the parameters of the first stage alone
(``clip_grad_norm_`` in runtime/utils.py), and ``FP16_UnfusedOptimizer`` counts tied and tensor-parallel gradients as often, or
as seldom, as their missing marks say. Its ZeRO optimisers and ``BF16_Optimizer`` are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.deepspeed_state import flat_gradients, groups_of
from ds_terapipe.loss_scaling import dividing_by_its_scale
from ds_terapipe.overrides import override
from ds_terapipe.parameter_marks import is_counted


def clip_by_true_norm(engine: Any) -> None:
    """Have an engine clip by the true norm of its gradients, which is also the one that it reports. Idempotent.

    Gradient norms are those of unscaled gradients, averaged over data-parallel replicas.
    """
    if "clip_fp32_gradients" not in vars(engine):
        override(engine, "clip_fp32_gradients", _clip_fp32_gradients)
        override(engine, "_take_model_step", _take_model_step)


def _clip_fp32_gradients(engine: Any, original: Callable[[], None]) -> None:
    engine._global_grad_norm = clip_gradients(
        engine.module.parameters(), engine.gradient_clipping(), engine.mpu, engine.device
    ).item()


def _take_model_step(engine: Any, take_step: Callable[..., None], lr_kwargs: Any = None) -> None:
    optimizer = engine.optimizer
    unfused = isinstance(optimizer, FP16_UnfusedOptimizer)
    if unfused:
        mark_gradients(engine.module.parameters())
        taking_part(optimizer)
    with dividing_by_its_scale(optimizer):
        take_step(lr_kwargs)
        if unfused and not optimizer.overflow:  # of scaled gradients, where the others report that of unscaled ones
            engine._global_grad_norm = optimizer._global_grad_norm / optimizer.loss_scale_config.cur_scale


def counting_nothing(optimizer: Any) -> None:
    """Let a ``BF16_Optimizer`` take the norm on a rank without counted parameters, where 0.19.8 fails.

    All of them may be another stage's tied weights, or replicas of the first tensor-parallel rank's.
    """
    every_gradient = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        found = every_gradient(for_clipping)
        if not for_clipping and not found[0]:
            found[0].append(torch.zeros(1, device=flat_gradients(optimizer)[0].device))
        return found

    optimizer.get_grads_for_norm = get_grads_for_norm


def taking_part(optimizer: FP16_UnfusedOptimizer) -> None:
    """Give zeros to a parameter group without gradients on this rank: 0.19.8 would leave the others waiting for its norm.

    All of the group may be other stages'.
    """
    for parameters in groups_of(optimizer):
        if parameters and all(parameter.grad is None for parameter in parameters):
            parameters[0].grad = torch.zeros_like(parameters[0])


def global_gradient_norm(parameters: Iterable[Parameter], mpu: Any, device: torch.device) -> Tensor:
    """2-norm of the gradients over all stages and tensor-parallel ranks, fp64, the same on all of them. Collective.

    Args:
        parameters: of this rank; those without gradient do not count.
        mpu: the pipeline's grid or Megatron's ``mpu``; None for a model that is whole on every rank.
        device: of the gradients.
    """
    tensor_rank = bwc_tensor_model_parallel_rank(mpu)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None and is_counted(parameter, tensor_rank):
            squares += square_sum(parameter.grad)
    if mpu is not None:
        dist.all_reduce(squares, group=mpu.get_model_parallel_group())
    return squares.sqrt()


def square_sum(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's squares, fp64 on its device; it may be sparse."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()  # a row's parts are added first
    norm: Tensor = torch.linalg.vector_norm(values, dtype=_wide(values)).double()
    return norm.square()


def clip_gradients(parameters: Iterable[Parameter], max_norm: float, mpu: Any, device: torch.device) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``; returns the norm before. Collective.

    Where the norm is infinite or not a number, the gradients stay as they are: zero times infinity would turn one bad gradient
    into zeros for all others.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_gradient_norm(parameters, mpu, device)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm


def mark_gradients(parameters: Iterable[Parameter]) -> None:
    """Copy the marks by which DeepSpeed counts each parameter once to the gradients.

    ``FP16_UnfusedOptimizer`` (0.19.8) takes the norm of a list of gradients and looks there for marks that only the parameters
    have: tied weights counted twice, tensor-parallel ones on their first rank alone.
    """
    for parameter in parameters:
        for mark in ("ds_pipe_replicated", "tensor_model_parallel", "model_parallel"):
            if parameter.grad is not None and hasattr(parameter, mark):
                setattr(parameter.grad, mark, getattr(parameter, mark))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
