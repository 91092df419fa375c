"""Rectangular attention, forward and backward: the queries of a slice over the keys up to the slice's end.

Each kernel is a pair of functions over plain tensors, because the slice's backward needs its parts separately: the key
gradients go into buffers outside the autograd graph. Kernels are ATen's fused ones (CPU flash; CUDA flash and
memory-efficient, as ``torch.nn.attention.bias.CausalBias`` calls them), else the formula itself, recomputed in the
backward pass.

Shapes: q [b, heads, rows, d], k and v [b, kv heads, columns, d], heads a multiple of kv heads. ``mask`` is None for
causal attention aligned to the lower right: row r sees columns up to columns - rows + r, with a window no more than so
many. Else it is additive, of the dtype of q, [1 | b, 1 | heads, rows, columns].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from ds_terapipe.pipeline.documents import Layout

_ATEN = torch.ops.aten
_LOWER_RIGHT = 2  # custom_mask_type of the efficient kernel: torch.nn.attention.bias.CausalVariant.LOWER_RIGHT
_BIAS_ALIGNMENT = 16  # elements; the efficient kernel loads its bias in aligned vectors
_KEPT_MASK = 1 << 21  # bytes of the largest mask that is kept for the next call on a CPU
_KEPT_MASKS = 32
_HEAD_ALIGNMENT = 8  # size of a head, for both of CUDA's


class Call(NamedTuple):
    """Arguments of a call that forward and backward share.

    Attributes:
        dropout_p: dropout probability of the attention weights.
        scale: factor of the scores; None: 1 / sqrt(d).
        softcap: scores become ``softcap * tanh(score / softcap)`` before any mask (Gemma 2); None: unchanged.
        window: without a mask a row sees so many columns, its own and those right before it; None: all before it.
        documents: documents of the rows, none of which sees another; only for `DocumentAttention`.
    """

    dropout_p: float
    scale: float | None
    softcap: float | None = None
    window: int | None = None
    documents: Layout | None = None


Made: TypeAlias = tuple[Tensor, tuple[Tensor, ...], Any]
"""Output [b, heads, rows, d], tensors to save for the backward pass, and other values to keep."""


class Gradients(NamedTuple):
    """Gradients of a call; ``mask`` only if the mask is learned."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> type[Formula]:
    """Return the fastest kernel that can run these tensors."""
    if call.softcap is not None or (mask is not None and mask.requires_grad):
        return Formula
    if q.device.type == "cpu":
        fits = q.shape[-1] == v.shape[-1] and call.dropout_p == 0.0
        return (
            CpuFlash if fits and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else Formula
        )
    return choose_on_cuda(q, k, v, mask, call) if q.device.type == "cuda" else Formula


def choose_on_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> type[Formula]:
    """Return the fastest CUDA kernel that PyTorch reports to support these tensors.

    PyTorch is asked without ``is_causal``, as in ``torch.nn.attention.bias.CausalBias``: to PyTorch causal means upper
    left, which flash does not support for rectangles; to the kernel it means lower right.
    """
    if q.shape[-1] % _HEAD_ALIGNMENT or q.shape[-1] != v.shape[-1]:
        return Formula
    grouped = q.shape[1] != k.shape[1]
    if mask is None and can_use_flash_attention(SDPAParams(q, k, v, None, call.dropout_p, False, grouped)):
        return CudaFlash
    if grouped and mask is None and call.window is None:  # as it will run, with equal numbers of heads
        k, v = (t[:, :1].expand(-1, q.shape[1], -1, -1) for t in (k, v))
    asked = SDPAParams(fold_groups(q, k.shape[1]), k, v, None, call.dropout_p, False, False)
    return CudaEfficient if can_use_efficient_attention(asked) else Formula


def fold_groups(x: Tensor, kv_heads: int) -> Tensor:
    """View [b, heads, rows, d] as [b, kv heads, groups * rows, d]: grouped queries are rows of the same key head."""
    b, heads, rows, d = x.shape
    return x if heads == kv_heads else x.reshape(b, kv_heads, heads // kv_heads * rows, d)


def causal_mask(
    rows: int, columns: int, groups: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> Tensor:
    """Return the additive lower-right causal mask [groups * rows, columns]; ``window``: keys per row.

    On a CPU small ones are cached for the next call, 64 MiB together. Others live as long as their call: making one
    costs little beside its attention.
    """
    make = _kept_mask if device.type == "cpu" and is_kept(rows, columns, groups, dtype) else _new_mask
    return make(rows, columns, groups, dtype, device, window)


def is_kept(rows: int, columns: int, groups: int, dtype: torch.dtype) -> bool:
    """Whether :func:`causal_mask` keeps such a mask on a CPU."""
    return groups * rows * columns * dtype.itemsize <= _KEPT_MASK


def _new_mask(
    rows: int, columns: int, groups: int, dtype: torch.dtype, device: torch.device, window: int | None
) -> Tensor:
    padded = -(-columns // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    hidden = torch.ones(rows, padded, dtype=torch.bool, device=device).triu_(columns - rows + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril_(columns - rows - window)
    mask = torch.zeros(rows, padded, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    del hidden
    return mask.repeat(groups, 1)[:, :columns]


_kept_mask = lru_cache(maxsize=_KEPT_MASKS)(_new_mask)


def _fold_mask(mask: Tensor | None, q: Tensor, k: Tensor, window: int | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if mask is None:
        return causal_mask(q.shape[2], k.shape[2], groups, q.dtype, q.device, window)
    if groups == 1:
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, groups, 1)
    return fold_groups(mask, k.shape[1])


class Formula:
    """softmax(q k^T scale + mask) v, written out; backward repeats the forward under autograd."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Made:
        """Run the call."""
        state = _random_state(q.device) if call.dropout_p > 0.0 else None
        return Formula.attend(q, k, v, mask, call), (q,), state

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Return the gradients of q, k, v and, if it requires one, of the mask."""
        learned = mask is not None and mask.requires_grad
        leaves = [t.detach().requires_grad_() for t in (saved[0], k, v)]
        if learned:
            assert mask is not None
            mask = mask.detach().requires_grad_()
            leaves.append(mask)
        with torch.enable_grad(), torch.random.fork_rng(_devices(grad.device), enabled=kept is not None):
            if kept is not None:
                _set_random_state(grad.device, kept)
            out = Formula.attend(leaves[0], leaves[1], leaves[2], mask, call)
        return Gradients(*torch.autograd.grad(out, leaves, grad))

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Tensor:
        """Compute the formula: [b, heads, rows, d of v]."""
        scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
        folded = fold_groups(q, k.shape[1])
        scores = torch.matmul(folded, k.transpose(-2, -1)) * scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores + _fold_mask(mask, q, k, call.window)
        if mask is None:
            weights = torch.softmax(scores, dim=-1)
        else:  # a row that its mask hides completely attends to nothing (torch's "safe softmax")
            empty = torch.isneginf(scores).all(-1, keepdim=True)
            weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
        weights = torch.nn.functional.dropout(weights, call.dropout_p)
        return torch.matmul(weights, v).reshape(*q.shape[:3], v.shape[-1])


class CpuFlash(Formula):
    """ATen's flash attention for CPU, which takes a rectangular mask."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Made:
        """Implement :meth:`Formula.forward`; saves q, output and log-sum-exp, groups folded."""
        folded, bias = fold_groups(q, k.shape[1]), CpuFlash._bias(q, k, mask, call)
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            folded, k, v, 0.0, bias is None, attn_mask=bias, scale=call.scale
        )
        return out if folded is q else out.reshape(q.shape), (folded, out, lse), None if folded is q else q.shape

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Implement :meth:`Formula.backward`."""
        folded, out, lse = saved
        bias = CpuFlash._bias(grad, k, mask, call)
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            fold_groups(grad, k.shape[1]).contiguous(), folded, k, v, out, lse, 0.0, bias is None,
            attn_mask=bias, scale=call.scale,
        )  # fmt: skip
        return Gradients(dq if kept is None else dq.reshape(kept), dk, dv)

    @staticmethod
    def _bias(q: Tensor, k: Tensor, mask: Tensor | None, call: Call) -> Tensor | None:
        if mask is None and call.window is None and q.shape[1:3] == k.shape[1:3]:
            return None  # the first slice: no mask to read, and the kernel skips what lies above the diagonal
        return _fold_mask(mask, q, k, call.window)


class CudaFlash(Formula):
    """FlashAttention-2 in ATen, [b, rows, heads, d]: causal is lower right, grouped heads and windows are its own."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Made:
        """Implement :meth:`Formula.forward`."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse, seed, offset, _ = _ATEN._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], call.dropout_p, True, False,
            scale=call.scale, window_size_left=CudaFlash.left(call),
        )  # fmt: skip
        return out.transpose(1, 2), (q, out, lse, seed, offset), None

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Implement :meth:`Formula.backward`."""
        q, out, lse, seed, offset = saved
        grad, k, v = (t.transpose(1, 2) for t in (grad, k, v))
        gradients = _ATEN._flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], call.dropout_p, True, seed, offset,
            scale=call.scale, window_size_left=CudaFlash.left(call),
        )  # fmt: skip
        return Gradients(*(t.transpose(1, 2) for t in gradients))

    @staticmethod
    def left(call: Call) -> int | None:
        """Return the number of columns before its own that a row sees."""
        return None if call.window is None else call.window - 1


class CudaEfficient(Formula):
    """Memory-efficient attention (also fp32, and explicit masks), [b, rows, heads, d].

    It does not support grouped heads. Without a mask each query head gets a copy of keys and values. With one, which
    would have to be repeated for every group anyway, groups are rows.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Made:
        """Implement :meth:`Formula.forward`."""
        shape, bias, kind = q.shape, *CudaEfficient._bias(q, k, mask, call)
        q, k, v = CudaEfficient._alike(q, k, v, bias)
        out, lse, seed, offset, max_q, max_k = _ATEN._efficient_attention_forward(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, None, None, None, None,
            call.dropout_p, kind, True, scale=call.scale,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(shape), (q, out, lse, seed, offset), (shape, max_q, max_k)

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Implement :meth:`Formula.backward`."""
        q, out, lse, seed, offset = saved
        shape, max_q, max_k = kept
        kv_heads = k.shape[1]
        bias, kind = CudaEfficient._bias(q.reshape(shape), k, mask, call)
        grad, k, v = CudaEfficient._alike(grad, k, v, bias)
        dq, dk, dv, _ = _ATEN._efficient_attention_backward(
            grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias,
            out, None, None, max_q, max_k, lse, call.dropout_p, seed, offset, kind, False, scale=call.scale,
        )  # fmt: skip
        dk, dv = (t.transpose(1, 2) for t in (dk, dv))
        if dk.shape[1] != kv_heads:
            dk, dv = (t.unflatten(1, (kv_heads, -1)).sum(2) for t in (dk, dv))
        return Gradients(dq.transpose(1, 2).reshape(shape), dk, dv)

    @staticmethod
    def _alike(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v with the same number of heads."""
        if bias is not None or q.shape[1] == k.shape[1]:
            return fold_groups(q, k.shape[1]), k, v
        groups = q.shape[1] // k.shape[1]
        return q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)

    @staticmethod
    def _bias(q: Tensor, k: Tensor, mask: Tensor | None, call: Call) -> tuple[Tensor | None, int]:
        if mask is None and call.window is None:
            return None, _LOWER_RIGHT
        bias = _fold_mask(mask, q, k, call.window)
        if not _is_aligned(bias):
            columns = bias.shape[-1]
            padded = bias.new_zeros(*bias.shape[:-1], columns + -columns % _BIAS_ALIGNMENT)
            padded[..., :columns] = bias
            bias = padded[..., :columns]
        rows = q.shape[1] // k.shape[1] * q.shape[2]
        return bias.expand(q.shape[0], k.shape[1], rows, k.shape[2]), 0


def _is_aligned(bias: Tensor) -> bool:
    """Whether every row of a bias starts where the efficient kernel can load it: by its offset and all its strides."""
    starts = [stride for size, stride in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if size > 1]
    return bias.stride(-1) == 1 and not any(start % _BIAS_ALIGNMENT for start in (bias.storage_offset(), *starts))


class Attention(torch.autograd.Function):
    """Attention without a mask, causal to the lower right, over complete keys: q, k, v and a :class:`Call`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        kernel = choose(q, k, v, None, call)
        out: Tensor
        out, saved, ctx.kept = kernel.forward(q, k, v, None, call)
        ctx.save_for_backward(k, v, *saved)
        ctx.kernel, ctx.call = kernel, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        k, v, *saved = ctx.saved_tensors
        gradients = ctx.kernel.backward(grad, tuple(saved), ctx.kept, k, v, None, ctx.call)
        return gradients.q, gradients.k, gradients.v, None


def _devices(device: torch.device) -> list[int]:
    return [device.index] if device.type == "cuda" and device.index is not None else []


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
