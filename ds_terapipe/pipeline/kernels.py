"""Rectangular attention, forward and backward: the queries of a slice over the keys up to the slice's end.

Each kernel is a pair of functions over plain tensors, because the slice's backward needs its pieces one by one: the key
gradients go into buffers that the autograd graph knows nothing of. Fused kernels of ATen where they exist (CPU flash;
CUDA flash and memory-efficient, as ``torch.nn.attention.bias.CausalBias`` calls them), else the formula itself, recomputed
in the backward pass.

Shapes: q [b, heads, rows, d], k and v [b, kv heads, columns, d], heads a multiple of kv heads. ``mask`` is None for causal
attention aligned to the lower right (row r sees columns up to columns - rows + r), or additive and of the dtype of q,
[1 | b, 1 | heads, rows, columns].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

_ATEN = torch.ops.aten
_LOWER_RIGHT = 2  # custom_mask_type of the efficient kernel: torch.nn.attention.bias.CausalVariant.LOWER_RIGHT
_BIAS_ALIGNMENT = 16  # columns; the efficient kernel loads its bias in aligned vectors


class Call(NamedTuple):
    """What stays the same between forward and backward of one call.

    Attributes:
        dropout_p: of the weights.
        scale: of the scores; None: 1 / sqrt(d).
        softcap: scores become ``softcap * tanh(score / softcap)`` before any mask (Gemma 2); None: they stay.
    """

    dropout_p: float
    scale: float | None
    softcap: float | None = None


class Gradients(NamedTuple):
    """Gradients of a call; ``mask`` only where the mask is learned."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> type[Formula]:
    """The fastest kernel that can run these tensors."""
    dropout_p = call.dropout_p
    if call.softcap is not None or (mask is not None and mask.requires_grad):
        return Formula
    if q.device.type == "cpu":
        fits = q.shape[-1] == v.shape[-1] and dropout_p == 0.0
        return (
            CpuFlash if fits and q.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else Formula
        )
    if q.device.type == "cuda":
        params = SDPAParams(q, k, v, None, dropout_p, True, q.shape[1] != k.shape[1])
        aligned = q.shape[-1] % 8 == 0 and q.shape[-1] == v.shape[-1]
        if mask is None and aligned and can_use_flash_attention(params):
            return CudaFlash
        folded = fold_groups(q, k.shape[1])
        if aligned and can_use_efficient_attention(SDPAParams(folded, k, v, None, dropout_p, True, False)):
            return CudaEfficient
    return Formula


def fold_groups(x: Tensor, kv_heads: int) -> Tensor:
    """[b, heads, rows, d] as [b, kv heads, groups * rows, d]: grouped queries are more rows of the same key head."""
    b, heads, rows, d = x.shape
    return x if heads == kv_heads else x.reshape(b, kv_heads, heads // kv_heads * rows, d)


@lru_cache(maxsize=64)
def causal_mask(
    rows: int, columns: int, groups: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> Tensor:
    """Additive lower-right causal mask [groups * rows, columns], the same for every group; ``window``: keys that a row sees."""
    padded = -(-columns // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    hidden = torch.ones(rows, padded, dtype=torch.bool, device=device).triu_(columns - rows + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril_(columns - rows - window)
    mask = torch.zeros(rows, padded, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(groups, 1)[:, :columns]


def _fold_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if mask is None:
        return causal_mask(q.shape[2], k.shape[2], groups, q.dtype, q.device)
    if groups == 1:
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, groups, 1)
    return fold_groups(mask, k.shape[1])


class Formula:
    """softmax(q k^T scale + mask) v, written out; backward repeats the forward under autograd."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        """Output [b, heads, rows, d], tensors to save, other things to keep."""
        state = _random_state(q.device) if call.dropout_p > 0.0 else None
        return Formula.attend(q, k, v, mask, call), (q,), state

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Gradients of q, k, v and, where it asks for one, of the mask."""
        learned = mask is not None and mask.requires_grad
        leaves = [t.detach().requires_grad_() for t in (saved[0], k, v)]
        if learned:
            assert mask is not None
            mask = mask.detach().requires_grad_()
            leaves.append(mask)
        with torch.enable_grad(), torch.random.fork_rng(_devices(grad.device), enabled=kept is not None):
            if kept is not None:
                _set_random_state(grad.device, kept)
            out = Formula.attend(*leaves[:3], mask, call)
        return Gradients(*torch.autograd.grad(out, leaves, grad))

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Tensor:
        """The formula: [b, heads, rows, d of v]."""
        scale = call.scale if call.scale is not None else q.shape[-1] ** -0.5
        folded = fold_groups(q, k.shape[1])
        scores = torch.matmul(folded, k.transpose(-2, -1)) * scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores + _fold_mask(mask, q, k)
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
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        """As :meth:`Formula.forward`; saves q, output and log-sum-exp, groups folded."""
        folded, square = fold_groups(q, k.shape[1]), CpuFlash._square(q, k, mask)
        bias = None if square else _fold_mask(mask, q, k)
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            folded, k, v, 0.0, square, attn_mask=bias, scale=call.scale
        )
        return out.reshape(q.shape), (folded, out, lse), q.shape

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """As :meth:`Formula.backward`."""
        folded, out, lse = saved
        q = folded.reshape(kept)
        square = CpuFlash._square(q, k, mask)
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            fold_groups(grad, k.shape[1]).contiguous(), folded, k, v, out, lse, 0.0, square,
            attn_mask=None if square else _fold_mask(mask, q, k), scale=call.scale,
        )  # fmt: skip
        return Gradients(dq.reshape(kept), dk, dv)

    @staticmethod
    def _square(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
        # the first slice: no mask to read, and the kernel skips what lies above the diagonal
        return mask is None and q.shape[1:3] == k.shape[1:3]


class CudaFlash(Formula):
    """FlashAttention-2 in ATen: causal means lower right for rectangles, grouped heads are native."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        """As :meth:`Formula.forward`."""
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _ATEN._scaled_dot_product_flash_attention(
            q, k, v, call.dropout_p, True, False, scale=call.scale
        )
        return out, (q, out, lse, seed, offset), (cum_q, cum_k, max_q, max_k)

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """As :meth:`Formula.backward`."""
        q, out, lse, seed, offset = saved
        return Gradients(
            *_ATEN._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, out, lse, *kept, call.dropout_p, True, seed, offset, scale=call.scale
            )
        )


class CudaEfficient(Formula):
    """Memory-efficient attention (also fp32, and explicit masks); it wants [b, rows, heads, d]."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        """As :meth:`Formula.forward`."""
        folded, (bias, kind) = fold_groups(q, k.shape[1]), CudaEfficient._bias(q, k, mask)
        out, lse, seed, offset, max_q, max_k = _ATEN._efficient_attention_forward(
            folded.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, None, None, None, None,
            call.dropout_p, kind, True, scale=call.scale,
        )  # fmt: skip
        return out.transpose(1, 2).reshape(q.shape), (folded, out, lse, seed, offset), (q.shape, max_q, max_k)

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """As :meth:`Formula.backward`."""
        folded, out, lse, seed, offset = saved
        shape, max_q, max_k = kept
        bias, kind = CudaEfficient._bias(folded.reshape(shape), k, mask)
        dq, dk, dv, _ = _ATEN._efficient_attention_backward(
            fold_groups(grad, k.shape[1]).transpose(1, 2), folded.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias,
            out, None, None, max_q, max_k, lse, call.dropout_p, seed, offset, kind, False, scale=call.scale,
        )  # fmt: skip
        return Gradients(dq.transpose(1, 2).reshape(shape), dk.transpose(1, 2), dv.transpose(1, 2))

    @staticmethod
    def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor | None, int]:
        if mask is None and q.shape[1] == k.shape[1]:
            return None, _LOWER_RIGHT
        bias = _fold_mask(mask, q, k)
        padding = -bias.shape[-1] % _BIAS_ALIGNMENT
        if padding and bias.stride(-2) % _BIAS_ALIGNMENT:
            bias = torch.nn.functional.pad(bias, (0, padding))[..., : bias.shape[-1]]
        rows = q.shape[1] // k.shape[1] * q.shape[2]
        return bias.expand(q.shape[0], k.shape[1], rows, k.shape[2]), 0


def _devices(device: torch.device) -> list[int]:
    return [device.index] if device.type == "cuda" and device.index is not None else []


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
