"""megatron-core's sequence-parallel regions on a CPU.

The functions of megatron-core 0.16.1 that gather and sum shares of tokens allocate on CUDA's current device. On a CPU
these replace them, with the same results.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor
from torch.nn import functional as F

from ds_terapipe.pipeline.token_shares import TokenShares


def replace_regions() -> None:
    """Replace them where there is no CUDA device; idempotent."""
    if torch.cuda.is_available() or mappings._gather_along_first_dim is _gather:
        return
    mappings._gather_along_first_dim = _gather
    mappings._reduce_scatter_along_first_dim = _sum
    layers.linear_with_grad_accumulation_and_async_allreduce = _linear


def _shares(group: Any) -> TokenShares:
    return TokenShares(group, group.size(), group.rank())


def _gather(input_: Tensor, group: Any, *unused: Any, **also_unused: Any) -> Tensor:
    return _shares(group).gather(input_)


def _sum(input_: Tensor, group: Any, *unused: Any, **also_unused: Any) -> Tensor:
    return _shares(group).sum(input_)


_upstream_linear = layers.linear_with_grad_accumulation_and_async_allreduce


@functools.wraps(_upstream_linear)  # its attribute ``warned``, too
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
    """Multiply all tokens by a column-parallel weight, where ``input`` is this rank's share of them."""
    if not kwargs.get("sequence_parallel"):
        return cast(Tensor, _upstream_linear(input, weight, bias, *args, **kwargs))
    whole = mappings.gather_from_sequence_parallel_region(input, True, kwargs["tp_group"])
    return F.linear(whole, weight, bias)
