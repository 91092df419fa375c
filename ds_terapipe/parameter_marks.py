"""Marks of DeepSpeed, Megatron and PyTorch on parameters that several ranks hold, whole or in parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_tensor_parallel(parameter: Tensor) -> bool:
    """Whether other tensor-parallel ranks hold other parts of the parameter, by Megatron's mark."""
    return bool(getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False))


def is_torch_shard(parameter: Tensor) -> bool:
    """Whether PyTorch holds the parameter in parts: a DTensor, as of FSDP2, or a flat one or its view, as of FSDP1."""
    marks = "_is_flat_param", "_fsdp_flattened"  # FSDP1's: of its own parameters, of those in the optimizer
    return hasattr(parameter, "__tensor_flatten__") or any(getattr(parameter, mark, False) for mark in marks)


def is_copy(parameter: Tensor) -> bool:
    """Whether the parameter is tied to one of another pipeline stage, which counts, by DeepSpeed's mark."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def count_untied(model: Any) -> None:
    """Remove the mark from weights of a ``PipelineModule`` that DeepSpeed does not tie: other stages may not have them."""
    tied = {id(weight) for weight, _ in model.get_tied_weights_and_groups()}
    for comm in model.tied_comms.values():
        for parameter in comm["module"].parameters():
            parameter.ds_pipe_replicated = is_copy(parameter) and id(parameter) in tied


def is_counted(parameter: Tensor, tensor_rank: int) -> bool:
    """True on exactly one rank for each parameter that several ranks hold: tied ones on their first stage, replicated ones
    on the first tensor-parallel rank."""
    return not is_copy(parameter) and (tensor_rank == 0 or is_tensor_parallel(parameter))
