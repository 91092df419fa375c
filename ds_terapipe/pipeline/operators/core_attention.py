"""Attention written as a module of Megatron's interface, run on a slice.

It handles modules called ``core_attention``: megatron-core's ``DotProductAttention``, Megatron-DeepSpeed's
``CoreAttention``. Their forward takes query, key, value as [s, b, heads, d] and returns [s, b, heads * d]. No Megatron
package is needed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_terapipe.pipeline.operators.attention import is_uncut, slice_attention
from ds_terapipe.pipeline.operators.context import SliceContext, refuse_model


def is_core_attention(name: str, module: nn.Module) -> bool:
    """Whether a module, called ``name`` by its parent, has this interface."""
    return name == "core_attention" and _scale(module) is not None


def _scale(module: nn.Module) -> float | None:
    """Return the factor on q k^T of a scores-softmax-values attention of Megatron's kind, else None.

    Both packages divide the scores by the layer number (query-key layer scaling) and multiply again in the softmax.
    """
    softmax = getattr(module, "scale_mask_softmax", None)
    if softmax is None or not hasattr(module, "attention_dropout"):
        return None
    again = float(getattr(softmax, "scale", None) or 1.0)
    if hasattr(module, "softmax_scale"):  # megatron-core DotProductAttention
        return float(cast(float, module.softmax_scale)) * again
    if hasattr(module, "norm_factor"):  # Megatron-DeepSpeed CoreAttention
        return again / float(cast(float, module.norm_factor))
    return None


def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replacement of the module's ``forward``; outside a slice it calls the original."""
    original: Any = type(module).forward
    context = SliceContext.current
    span = context.span if context is not None else None
    if context is None or span is None or is_uncut(context):
        return original(module, query, key, value, *args, **kwargs)
    given = _signature(original).bind(module, query, key, value, *args, **kwargs).arguments
    _refuse_variants(context, module, given)
    mask = _visible(given.get("attention_mask"), span.total)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    dropout_p = module.attention_dropout.p if module.training else 0.0
    with _model_parallel_random(module, dropout_p):
        out = slice_attention(context, q, k, v, mask, dropout_p, _scale(module))
    return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


_signature = functools.cache(inspect.signature)


def _visible(mask: Tensor | None, total: int) -> Tensor | None:
    """Convert Megatron's mask (True: hidden) to "may attend"; None for the plain causal mask, which is not needed."""
    if mask is None or (mask.dtype == torch.bool and mask.shape[-2:] == (total, total) and _is_causal(mask)):
        return None
    return ~mask if mask.dtype == torch.bool else mask < 0.5


def _is_causal(mask: Tensor) -> bool:
    # Megatron keeps one mask for the whole run: compare it once. Version and address tell another tensor in its place.
    identity = None if mask.is_inference() else (mask.data_ptr(), mask._version)
    known = getattr(mask, "_ds_terapipe_causal", None)
    if known is None or identity is None or known[0] != identity:
        hidden = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu_(1)
        known = (identity, bool((mask == hidden).all()))
        mask._ds_terapipe_causal = known  # type: ignore[attr-defined]
    return known[1]


def _model_parallel_random(module: nn.Module, dropout_p: float) -> AbstractContextManager[Any]:
    """Context manager for Megatron's random state that differs between tensor-parallel ranks, as in its dropout."""
    tensor_parallel = getattr(sys.modules.get(type(module).__module__), "tensor_parallel", None)
    if dropout_p == 0.0 or tensor_parallel is None:
        return nullcontext()
    forked: AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
    return forked


def _refuse_variants(context: SliceContext, module: nn.Module, given: dict[str, Any]) -> None:
    where = context.describe()
    kind = given.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    if "causal" not in getattr(kind, "name", str(kind)):
        raise refuse_model(f"core attention whose mask type is {getattr(kind, 'name', kind)}, not causal ({where})")
    for name in ("attention_bias", "packed_seq_params"):
        if given.get(name) is not None:
            raise refuse_model(f"core attention with {name} ({where})")
    if getattr(module.scale_mask_softmax, "window_size", None) is not None:
        raise refuse_model(f"core attention with a sliding window ({where})")
    if getattr(module, "softmax_offset", None) is not None:
        raise refuse_model(f"core attention with a softmax offset ({where})")
