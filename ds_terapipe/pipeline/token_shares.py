"""Shares of a slice's tokens on tensor-parallel ranks: Megatron's sequence parallelism.

Outside the products of a layer each tensor-parallel rank has one share of a slice's tokens (Korthikanti et al. 2022,
arXiv 2205.05198). The shares of all ranks, in order, are the slice. So a slice is a multiple of as many tokens as there
are ranks, and a rank's share of a slice is not a part of its share of the sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist, nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.gradients import gradient_name


class TokenShares(NamedTuple):
    """Tensor-parallel ranks that share the tokens of a slice.

    Attributes:
        group: their process group.
        size: number of ranks.
        rank: index of this rank, and of its share.
    """

    group: Any
    size: int
    rank: int

    @torch.no_grad()  # under gloo a thread of its own would write into views, with autograd on
    def gather(self, share: Tensor, dim: int = 0) -> Tensor:
        """Join the shares of all ranks along ``dim``; collective."""
        first = share.transpose(0, dim).contiguous()
        whole = first.new_empty(self.size * first.shape[0], *first.shape[1:])
        _all_gather(whole, first, group=self.group)
        return whole.transpose(0, dim)

    def own(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's share of a tensor of all tokens."""
        length = whole.shape[dim] // self.size
        return whole.narrow(dim, self.rank * length, length)

    def sum(self, whole: Tensor) -> Tensor:
        """Return this rank's share, along the first dimension, of the sum of the ranks' tensors; collective."""
        share = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        _reduce_scatter(share, whole.contiguous(), group=self.group)
        return share


# renamed in PyTorch 2.13
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def shares_of(module: Any, gather: Callable[[bool], Sequence[bool]]) -> TokenShares | None:
    """Return the shares of a module's layers; None if its tensor-parallel ranks have all tokens; collective.

    Args:
        module: a ``PipelineModule``; a layer, its config or a parameter has ``sequence_parallel=True``.
        gather: returns the values of all ranks; collective.
    """
    grid = module.mpu()
    divided = grid.get_slice_parallel_world_size() > 1 and any(map(is_divided, module.modules()))
    if not any(gather(divided)):
        return None
    return TokenShares(
        grid.get_slice_parallel_group(), grid.get_slice_parallel_world_size(), grid.get_slice_parallel_rank()
    )


def is_divided(layer: Any) -> bool:
    """Whether a layer is one of Megatron's with sequence parallelism."""
    holders = (layer, getattr(layer, "config", None), *layer.parameters(recurse=False))
    return any(getattr(holder, "sequence_parallel", False) is True for holder in holders)


def sum_over_parts(engine: Any, weights: Iterable[Any]) -> None:
    """Sum the gradients of :func:`applied_to_parts` over the tensor-parallel ranks; collective.

    As Megatron's ``_allreduce_non_tensor_model_parallel_grads``, which DeepSpeed's engine does not call.
    """
    group, of_type, name = engine.grid.get_slice_parallel_group(), defaultdict(list), gradient_name(engine)
    for weight in weights:
        if (gradient := getattr(weight, name)) is not None:
            of_type[gradient.dtype].append(gradient)
    for gradients in of_type.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def applied_to_parts(module: Any) -> list[nn.Parameter]:
    """Return trained weights that tensor-parallel ranks hold alike and apply to parts of the tokens or heads only.

    With sequence parallelism these are norms, and biases behind row-parallel products. Megatron marks them.
    Megatron-DeepSpeed's norm for devices without its fused one marks its weight only. Norms of queries and keys see a rank's
    own heads. Megatron knows them by these names.
    """
    if module.mpu().get_slice_parallel_world_size() == 1:
        return []
    found: dict[int, nn.Parameter] = {}
    for layer in module.modules():
        divided = getattr(layer, "sequence_parallel", False) is True
        for parameter in layer.parameters(recurse=False):
            whole = divided and not getattr(parameter, "tensor_model_parallel", False)
            if whole or getattr(parameter, "sequence_parallel", False) is True:
                found[id(parameter)] = parameter
        if hasattr(layer, "linear_qkv"):
            norms = getattr(layer, "q_layernorm", None), getattr(layer, "k_layernorm", None)
            found.update((id(weight), weight) for norm in norms if norm is not None for weight in norm.parameters())
    return [parameter for parameter in found.values() if parameter.requires_grad]


def whole_gradients(module: Any) -> Callable[[nn.Parameter], Tensor | None]:
    """Return the function that gives a weight's gradient, that of :func:`applied_to_parts` summed over ranks; collective."""
    parts = {id(weight) for weight in applied_to_parts(module)} if hasattr(module, "mpu") else set()

    def whole(weight: nn.Parameter) -> Tensor | None:
        if weight.grad is None or id(weight) not in parts:
            return weight.grad
        summed = weight.grad.clone()
        dist.all_reduce(summed, group=module.mpu().get_slice_parallel_group())
        return summed

    return whole


def check_length(total: int, multiple: int) -> None:
    """Raise ConfigError for sequences of ``total`` tokens that so many ranks cannot share."""
    if total % multiple:
        raise ConfigError(
            f"the data iterator: got sequences of {total} tokens, must be a multiple of the {multiple} tensor-parallel ranks "
            f"that share them (sequence_parallel), use e.g. {-(-total // multiple) * multiple}"
        )
