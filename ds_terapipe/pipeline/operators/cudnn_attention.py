"""Attention of a slice by cuDNN, which PyTorch prefers on Hopper and Blackwell GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ds_terapipe.pipeline.operators.kernels import Call, CudaFlash, Formula, Gradients, Made

_ATEN = torch.ops.aten
_MAX_SHAPES = 256
_LEAST_WORK = 5e9  # rows x keys x heads x size; below it an H200 gains less by cuDNN than its second call takes
_shapes: set[tuple[Any, ...]] = set()


def preferred(kernel: type[Formula], q: Tensor, k: Tensor, v: Tensor, call: Call, before: int) -> type[Formula]:
    """Return `CudaCudnn` in place of FlashAttention-2 where PyTorch would run cuDNN, else ``kernel``.

    cuDNN makes a plan for each shape at its first call, which took 0.1 s on an H200. So of sequences of ever new lengths
    only the first ones get it.

    Args:
        kernel: the kernel for these tensors without cuDNN.
        before: number of keys before those of the rows.
    """
    # two calls share no window and no dropout, and cuDNN refuses a single key
    if kernel is not CudaFlash or call.window is not None or call.dropout_p > 0.0 or 1 in (q.shape[2], before):
        return kernel
    grouped = q.shape[1] != k.shape[1]
    if torch._fused_sdp_choice(q, k, v, enable_gqa=grouped) != SDPBackend.CUDNN_ATTENTION.value:
        return kernel
    batch, heads, rows, size = q.shape
    if before and batch * heads * rows * (before + rows / 2) * size < _LEAST_WORK:
        return kernel
    shape = (q.dtype, *q.shape, k.shape[1], before)
    if shape not in _shapes and len(_shapes) == _MAX_SHAPES:
        return kernel
    _shapes.add(shape)
    return CudaCudnn


class CudaCudnn(Formula):
    """cuDNN's fused attention in ATen, [b, heads, rows, d]: over the keys before the rows, and causal over their own.

    Its causal mask is aligned to the upper left, so that a rectangle takes two calls. Their log-sum-exps weight the two
    outputs. With the joint output and log-sum-exp, the gradients of each call are exact shares of the whole, as in Ring
    Attention (arXiv 2310.01889).
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Made:
        """Implement :meth:`Formula.forward`."""
        before, rows = k.shape[2] - q.shape[2], q.shape[2]
        out, sums, seed, offset = _attend(q, k.narrow(2, before, rows), v.narrow(2, before, rows), True, call)
        if before:
            earlier, earlier_sums, _, _ = _attend(q, k.narrow(2, 0, before), v.narrow(2, 0, before), False, call)
            weight = torch.sigmoid(sums - earlier_sums).reshape(*q.shape[:3], 1)
            rest = torch.addcmul(earlier, earlier, weight, value=-1.0)  # fp32
            torch.addcmul(rest, out, weight, out=out)
            sums = torch.logaddexp(sums, earlier_sums)
        return out, (q, out, sums, seed, offset), None

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Implement :meth:`Formula.backward`."""
        rows, before = grad.shape[2], k.shape[2] - grad.shape[2]
        own = _gradients(grad, saved, k.narrow(2, before, rows), v.narrow(2, before, rows), True, call)
        if not before:
            return own
        earlier = _gradients(grad, saved, k.narrow(2, 0, before), v.narrow(2, 0, before), False, call)
        dk, dv = torch.cat((earlier.k, own.k), dim=2), torch.cat((earlier.v, own.v), dim=2)
        return Gradients(own.q.add_(earlier.q), dk, dv)


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, log-sum-exp, and seed and offset of a dropout that draws nothing."""
    made = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False, scale=call.scale)
    return made[0], made[1], made[6], made[7]


def _gradients(grad: Tensor, saved: tuple[Tensor, ...], k: Tensor, v: Tensor, is_causal: bool, call: Call) -> Gradients:
    q, *of_forward = saved
    no_bias_and_lengths, sizes = (None, None, None), (q.shape[2], k.shape[2])
    backward = _ATEN._scaled_dot_product_cudnn_attention_backward
    return Gradients(
        *backward(grad, q, k, v, *of_forward, *no_bias_and_lengths, *sizes, 0.0, is_causal, scale=call.scale)
    )
