"""Override of the ATen operator behind ``F.scaled_dot_product_attention``, for slices.

Only below autograd's Python API one also sees recomputation (autograd drops torch-function modes during backward),
checkpoints inside a layer, ``nn.MultiheadAttention`` and TorchScript. Outside a slice the override calls the original.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_terapipe.pipeline.operators.attention import is_uncut, refuse_compiled, slice_attention
from ds_terapipe.pipeline.operators.context import CallForm, PlacementError, SliceContext, refuse_model

_SDPA = torch.ops.aten.scaled_dot_product_attention.default


class Overrides:
    """Installs the override of the ATen operator once per process, while it has users."""

    _library: torch.library.Library | None = None
    _users = 0

    @classmethod
    def acquire(cls) -> None:
        """Install the override, or count one more user."""
        cls._users += 1
        if cls._library is not None:
            return
        cls._library = torch.library.Library("aten", "IMPL")
        for device in ("CPU", "CUDA"):
            cls._library.impl("scaled_dot_product_attention", _sdpa, f"Autograd{device}")
            cls._library.impl("scaled_dot_product_attention", _sdpa, device)  # tensors of torch.inference_mode

    @classmethod
    def release(cls) -> None:
        """Remove the override with its last user."""
        cls._users = max(cls._users - 1, 0)
        if cls._users == 0 and cls._library is not None:
            cls._library._destroy()
            cls._library = None


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    context = SliceContext.current
    if context is None or not _mixes_tokens(context, query, key, value, attn_mask, is_causal):
        dropout_p = dropout_p if context is None or context.dropout else 0.0
        found: Tensor = _SDPA.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found
    if query.dim() >= 3 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise PlacementError(f"{query.shape[-3]} query heads over {key.shape[-3]} key heads need enable_gqa=True")
    return slice_attention(context, query, key, value, attn_mask, dropout_p, scale, is_causal=is_causal)


def _mixes_tokens(
    context: SliceContext, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> bool:
    """Whether a call is attention of the slice's tokens over each other. Raises if that is undecidable.

    False for calls that concern no slice: whole sequences, attention over another dimension, cross attention to an
    uncut tensor.
    """
    span = context.span
    if span is None or is_uncut(context):
        return False
    refuse_compiled(context, query)
    over_itself = query.shape[-2] == span.length and key.shape[-2] == span.length
    if is_causal and not over_itself:
        raise PlacementError(
            f"causal attention of {query.shape[-2]} queries over {key.shape[-2]} keys in a slice of {span.length} tokens "
            f"({context.describe()}): it can't be placed"
        )
    form = CallForm.of(query, key, value, causal=is_causal and mask is None)
    if not is_causal:
        if not over_itself:
            _refuse_packed_heads(context, query, key)
        if context.is_apart(form, key, value, over_itself=over_itself):
            context.pass_call()
            return False
    is_new = not is_causal and context.is_new(form, key.shape[-2])
    if is_causal or mask is not None:
        if span.length > 1:
            context.note_call(form)
        return True
    # a call that no slice has made may be over other keys, which the next slice says
    if _is_causal_for_more_tokens(context, query, key, value) or (is_new and span.length > 1):
        return True
    raise refuse_model(f"attention that is not causal ({context.describe()})")


def _is_causal_for_more_tokens(context: SliceContext, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call of one token over itself, without a mask and without ``is_causal``, is causal all the same.

    With or without the flag, a single query attends to all keys so far and its own, so Hugging Face's attention omits
    the flag. A bidirectional layer's call looks the same, so the call must have set the flag in a slice of more tokens.
    The inspection before the first step begins with such a slice, so every call of every layer is known by then.
    """
    if context.span is None or context.span.length > 1:
        return False
    # a recomputed call has passed this check in forward, and is placed by its keys
    return context.is_recomputing or context.known_form() == CallForm.of(query, key, value, causal=True)


def _refuse_packed_heads(context: SliceContext, query: Tensor, key: Tensor) -> None:
    """Refuse a call over one token whose query heads were folded into several queries for each of fewer key heads.

    Newer versions of Hugging Face's attention do so if there is a mask, or the heads are large. Undetected, it would be
    attention over the slice's own key alone.
    """
    span, queries, known = context.span, query.shape[-2], context.known_form()
    if span is None or span.length > 1 or known is None or queries == 1 or key.shape[-2] > 1 or query.dim() < 3:
        return
    if query.shape[-3] == key.shape[-3] and query.shape[-3] * queries == known.heads:
        raise refuse_model(
            f"attention that takes {known.heads} query heads of one token as {queries} queries of {key.shape[-3]} key heads "
            f"({context.describe()})",
            'use "slices" of two tokens or more',
        )
