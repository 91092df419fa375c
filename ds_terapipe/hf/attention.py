"""Attention of Hugging Face's models, in slices and whole: an entry of transformers' ``AttentionInterface``.

A model whose ``config._attn_implementation`` is :data:`NAME` calls :func:`attention` in place of its own. Within a slice that is
the attention over the keys so far; anywhere else it is PyTorch's, so that such a model evaluates and generates as before. Windows
and soft caps (Gemma 2) come as arguments of the call, as they do for transformers' flash attention, and need no mask.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.operators import kernels
from ds_terapipe.pipeline.operators.attention import is_uncut, slice_attention
from ds_terapipe.pipeline.operators.context import SliceContext, refuse_model

NAME = "ds_terapipe"
# Implementations of transformers that this one stands in for; others have kernels of their own.
SERVED = (None, "eager", "sdpa", NAME)
_WINDOW = "_ds_terapipe_window"  # of a module whose layer has a place in a decoder
# Arguments that change what attention computes, and are not followed.
_UNKNOWN = ("position_bias", "s_aux", "cache", "block_table")


def register() -> None:
    """Make :data:`NAME` known to transformers; as often as one likes."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def place_windows(layer: nn.Module, layer_type: str | None, config: Any) -> None:
    """Note the window that transformers' mask gives a layer by its place, which the layer may not have been built for."""
    if layer_type in ("full_attention", "sliding_attention"):
        for module in layer.modules():
            vars(module)[_WINDOW] = None if layer_type == "full_attention" else getattr(config, "sliding_window", None)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers call it.

    Args:
        module: the calling module; has ``is_causal`` if the argument is None.
        query: [b, heads, rows, d].
        key, value: [b, kv heads, columns, d].
        attention_mask: bool (True: may attend) or additive, [1 | b, 1 | heads, rows, columns]; a causal module is causal, too.
        dropout: probability.
        scaling: of the scores; None: 1 / sqrt(d).
        is_causal: whether a token sees none after it.
        sliding_window: tokens that one sees, itself and those right before it.
        softcap: as for :func:`ds_terapipe.pipeline.operators.attention.slice_attention`.
        others: of other implementations.

    Returns:
        [b, rows, heads, d], and no weights.

    Raises:
        ConfigError: an argument that is not followed, or attention within a slice that is not causal.
        PlacementError: attention of a slice that is compiled.
    """
    given = [name for name in _UNKNOWN if others.get(name) is not None]
    if given:
        raise ConfigError(
            f'attn_implementation: got "{NAME}" for a layer that calls it with {given[0]}, must do without, use "eager"'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    sliding_window = vars(module).get(_WINDOW, sliding_window)
    context = SliceContext.current
    if context is None or is_uncut(context):
        dropout = dropout if context is None or context.dropout else 0.0
        out = _whole(query, key, value, attention_mask, kernels.Call(dropout, scaling, softcap), causal, sliding_window)
        return out.transpose(1, 2).contiguous(), None
    if not causal:
        raise refuse_model(f"attention that is not causal ({context.describe()})")
    out = slice_attention(
        context, query, key, value, attention_mask, dropout, scaling,
        is_causal=True, window=sliding_window, softcap=softcap,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _whole(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: kernels.Call, causal: bool, window: int | None
) -> Tensor:
    """Compute attention of an uncut sequence, or of generated tokens over earlier ones: causal to the lower right."""
    rows, columns = q.shape[2], k.shape[2]
    hides = window is not None and columns > window
    square = rows == columns and not hides
    if causal and mask is None and square and call.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, None, call.dropout_p, rows > 1, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if causal and mask is None and (rows > 1 or hides):  # no mask, which each layer would keep for its backward pass
        whole: Tensor = cast(Any, kernels.Attention).apply(q, k, v, call._replace(window=window if hides else None))
        return whole
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    if causal and mask is not None and (rows > 1 or hides):
        hidden = kernels.causal_mask(rows, columns, 1, q.dtype, q.device, window if hides else None)
        mask = mask.to(q.dtype) + hidden
    if call.softcap is not None:
        nothing = q.new_zeros(1, 1, rows, columns)
        return kernels.Formula.attend(q, k, v, nothing if mask is None else mask, call)
    if q.shape[1] != k.shape[1]:  # with a mask CUDA's fused kernels take no grouped heads
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, call.dropout_p, scale=call.scale)
