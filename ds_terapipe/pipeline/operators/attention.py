"""Causal attention of one slice over the keys and values so far, forward and backward.

Keys and values of a micro-batch are kept once per layer in [b, kv heads, S, d]. A slice writes its own range, which
makes recomputation idempotent. Slices run backward in descending order, so every later slice has already added its
share to a slice's dK and dV. These are summed in fp32 (fp64 for fp64). Work per slice is proportional to slice x
(context + slice); the buffers are read through narrow views and never copied. TeraPipe (arXiv 2102.07988) section 3
gives the dependency; its own code clones full-length gradients per slice instead.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_terapipe.pipeline.operators import cudnn_attention, kernels
from ds_terapipe.pipeline.operators.autograd import apply, once_differentiable
from ds_terapipe.pipeline.operators.buffers import AttentionState
from ds_terapipe.pipeline.operators.compiled import suits
from ds_terapipe.pipeline.operators.context import PlacementError, SliceContext, refuse_model
from ds_terapipe.pipeline.operators.document_attention import DocumentAttention
from ds_terapipe.pipeline.slicing import Span
from ds_terapipe.skip_init import is_skipping_init


class SliceAttention(torch.autograd.Function):
    """Attention of one slice, [b, heads, slice, d]; the buffers live on ``ctx``, since later slices write into them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        state: AttentionState,
        span: Span,
        first: int,
        call: kernels.Call,
    ) -> Tensor:
        state.write(k, v, span)
        ctx.keys = keys, values = state.keys(first, span.stop)
        ctx.kernel = (
            DocumentAttention if call.documents is not None else _kernel(q, keys, values, mask, call, span, first)
        )
        out: Tensor
        out, saved, ctx.kept = ctx.kernel.forward(q, keys, values, mask, call)
        ctx.save_for_backward(mask, *saved)
        ctx.state, ctx.span, ctx.first, ctx.call = state, span, first, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, *saved = ctx.saved_tensors
        gradients = ctx.kernel.backward(grad, tuple(saved), ctx.kept, *ctx.keys, mask, ctx.call)
        dk, dv = ctx.state.gradients.add(gradients.k, gradients.v, ctx.span.start, ctx.span.stop, ctx.first)
        return gradients.q, dk, dv, gradients.mask, None, None, None, None


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: kernels.Call, span: Span, first: int
) -> type[kernels.Formula]:
    """Return the kernel of a slice over the keys from ``first`` on; ``k`` and ``v`` may be its own part alone."""
    kernel = kernels.choose(q, k, v, mask, call)
    # cuDNN makes a plan for each shape, and the keys of a document have another number in every batch
    return kernel if first else cudnn_attention.preferred(kernel, q, k, v, call, span.start)


def cut_mask(mask: Tensor, span: Span, dtype: torch.dtype, where: str = "") -> Tensor:
    """Return the part of an explicit mask for a slice, additive.

    ``mask`` is bool (True: may attend) or additive, [..., rows, columns] with rows 1, slice or S and columns context +
    slice or S. Raises ConfigError for other shapes, naming ``where``, since their cut is unknown.
    """
    rows, columns = mask.shape[-2:]
    if columns not in (span.stop, span.total) or rows not in (1, span.length, span.total):
        advice = f"a mask must have {span.stop} (context and slice) or {span.total} columns"
        if is_causal_square(mask if mask.dtype == torch.bool else mask == 0, span.length):
            advice = "it is causal and hides nothing else, use is_causal=True in its place"
        raise refuse_model(
            f"an attention mask of {rows} x {columns} for tokens {span.start} to {span.stop} of {span.total} ({where})",
            advice,
        )
    if rows == span.total and rows != span.length:
        mask = mask[..., span.start : span.stop, :]
    mask = mask[..., : span.stop]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return mask.to(dtype).expand(*mask.shape[:-2], span.length, span.stop)


def is_causal_square(visible: Tensor, length: int) -> bool:
    """Whether a mask of at least two rows, True for visible tokens, is square and causal."""
    if visible.dim() < 2 or visible.shape[-2:] != (length, length) or length < 2:
        return False
    return bool((visible == torch.ones(length, length, dtype=torch.bool, device=visible.device).tril()).all())


def is_uncut(context: SliceContext) -> bool:
    """Whether attention is that of a whole sequence of one document, which is computed as without a context."""
    span, documents = context.span, context.documents
    if span is None or not span.is_whole:
        return span is None
    return documents is None or documents.layout(span).is_one_document


def _is_in_compiled_function() -> bool:
    """Whether a function that ``torch.compile`` has made calls this one, and ``torch.compiler.disable`` made none since."""
    frame = sys._getframe().f_back
    while frame is not None and not frame.f_code.co_filename.endswith("torch/_dynamo/eval_frame.py"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "compile_wrapper"


def refuse_compiled(context: SliceContext, query: Tensor) -> None:
    """Raise :class:`PlacementError` if attention of a slice is traced, not run."""
    # layers that were built empty run on fake tensors to be counted, and nothing is compiled
    traced = isinstance(query, FakeTensor) and not is_skipping_init()
    # the inspection, which has no dropout, runs compiled functions as they are written
    if traced or torch.compiler.is_compiling() or (not context.dropout and _is_in_compiled_function()):
        raise PlacementError(
            f"attention is compiled by torch.compile ({context.describe()}): a slice's position would be baked in, "
            "don't compile the layers of a model that runs with token_pipeline"
        )


def slice_attention(
    context: SliceContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    *,
    is_causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention of the context's present slice over all keys so far; causal without a mask.

    A token sees only keys of its own document, where the micro-batch has `Documents`.

    ``is_causal``: causal in addition to the mask (torch since 2.13; before, the two exclude each other). ``window``: a
    token sees so many keys, its own and those right before it; no other key is read. ``softcap``: see
    :class:`kernels.Call`.

    q [..., heads, slice, d], k and v [..., kv heads, slice, d] (a leading batch dimension may be absent); returns
    [..., heads, slice, d of v]. Raises :class:`PlacementError` for a call that the context cannot place.
    """
    span = context.span
    assert span is not None
    refuse_compiled(context, q)
    dims = q.dim()
    if dims not in (3, 4) or k.dim() != dims or v.dim() != dims:
        raise PlacementError(f"attention over tensors of {dims} dimensions ({context.describe()}): must be 3 or 4")
    batched = dims == 4
    if not batched:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if not q.shape[0] == k.shape[0] == v.shape[0]:  # kernels do not broadcast
        batch = max(t.shape[0] for t in (q, k, v))
        q, k, v = (t.expand(batch, -1, -1, -1) for t in (q, k, v))
    layout = None if context.documents is None else context.documents.layout(span)
    if layout is not None and mask is not None:
        raise refuse_model(f"an attention mask beside packed documents ({context.describe()})", "leave one of them out")
    first = 0 if layout is None else layout.first
    if layout is not None and layout.is_one_document:
        layout = None
    if layout is None and window is not None:
        first = max(first, span.start - window + 1)
    columns = span.stop - first
    window = window if window is not None and columns > window else None  # else it hides nothing
    if mask is not None:
        if not (is_causal or context.is_recomputing):
            context.note_future(mask, span)
        mask = cut_mask(mask, span, q.dtype, context.describe())[..., first:]
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        if is_causal or window is not None:
            mask = mask + kernels.causal_mask(span.length, columns, 1, q.dtype, q.device, window)
    state = context.place(k, v)
    call = kernels.Call(dropout_p if context.dropout else 0.0, scale, softcap, window if mask is None else None, layout)
    out = None
    if context.compiled is not None and mask is None and layout is None and softcap is None and suits(q, k, v):
        out = _compiled_attention(context.compiled, q, k, v, state, span, first, call)
    if out is None:
        out = apply(SliceAttention, q, k, v, mask, state, span, first, call)
    return out if batched else out.squeeze(0)


def _compiled_attention(
    compiled: Any, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, span: Span, first: int, call: kernels.Call
) -> Tensor | None:
    """Run a call without a mask in C++; None if its kernel is not there, or if its bias is too large to be kept."""
    kernel, columns, groups = _kernel(q, k, v, None, call, span, first), span.stop - first, q.shape[1] // k.shape[1]
    bias = None
    if kernel is kernels.CpuFlash:
        if not kernels.is_kept(span.length, columns, groups, q.dtype):
            return None
        if call.window is not None or groups > 1 or columns > span.length:
            bias = kernels.causal_mask(span.length, columns, groups, q.dtype, q.device, call.window)
    elif kernel not in (kernels.CudaFlash, cudnn_attention.CudaCudnn):
        return None
    state.filled = max(state.filled, span.stop)
    left, by_cudnn = kernels.CudaFlash.left(call), kernel is cudnn_attention.CudaCudnn
    out: Tensor = compiled.attention(
        q,
        k,
        v,
        state.k,
        state.v,
        state.gradients,
        span.start,
        span.stop,
        first,
        bias,
        call.dropout_p,
        call.scale,
        left,
        by_cudnn,
    )
    return out
