"""The true norm of all gradients of a model that is spread over pipeline stages and tensor-parallel ranks.

DeepSpeed's fp32 pipeline counts the parameters of the first stage alone (``clip_grad_norm_`` in runtime/utils.py, 0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor
from torch.nn import Parameter


def is_counted(parameter: Parameter, tensor_rank: int) -> bool:
    """True on exactly one rank for each parameter that several ranks hold: tied ones on their first stage, replicated ones
    on the first tensor-parallel rank."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    sharded = getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
    return tensor_rank == 0 or bool(sharded)


def global_gradient_norm(parameters: Iterable[Parameter], grid: Any, device: torch.device) -> Tensor:
    """2-norm of the gradients over all stages and tensor-parallel ranks, fp64, the same on all of them. Collective."""
    tensor_rank = grid.get_slice_parallel_rank()
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None and is_counted(parameter, tensor_rank):
            squares += torch.linalg.vector_norm(parameter.grad.detach(), dtype=_wide(parameter.grad)).double() ** 2
    dist.all_reduce(squares, group=grid.get_model_parallel_group())
    return squares.sqrt()


def clip_gradients(parameters: Iterable[Parameter], max_norm: float, grid: Any, device: torch.device) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``; returns the norm before. Collective."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_gradient_norm(parameters, grid, device)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(factor.to(parameter.grad.dtype))
    return norm


def mark_gradients(parameters: Iterable[Parameter]) -> None:
    """Put the marks by which DeepSpeed counts each parameter once on the gradients as well.

    ``FP16_UnfusedOptimizer`` (0.19.8) takes the norm of a list of gradients and looks there for marks that only the parameters
    have: tied weights counted twice, tensor-parallel ones on their first rank alone.
    """
    for parameter in parameters:
        for mark in ("ds_pipe_replicated", "tensor_model_parallel", "model_parallel"):
            if parameter.grad is not None and hasattr(parameter, mark):
                setattr(parameter.grad, mark, getattr(parameter, mark))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
