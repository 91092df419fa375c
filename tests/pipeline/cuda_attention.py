"""What CUDA's attention operators do, on a CPU: a stand-in for ``torch.ops.aten`` that is as strict as they are.

After ``aten/src/ATen/native/transformers/cuda`` of PyTorch 2.13: what their checks refuse is an error here, what they compute is
the formula. Tensors are [b, rows, heads, d].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOWER_RIGHT = 2


def can_flash(params: Any) -> bool:
    """``torch.backends.cuda.can_use_flash_attention`` on a device of compute capability 8.0."""
    q, k, v = params.query, params.key, params.value
    return (
        params.attn_mask is None
        and not (params.is_causal and q.shape[2] != k.shape[2])  # check_flash_causal_non_square_seqlens
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and (q.shape[1] == k.shape[1] or (params.enable_gqa and q.shape[1] % k.shape[1] == 0))
    )


def can_efficient(params: Any) -> bool:
    """``torch.backends.cuda.can_use_efficient_attention`` on such a device, where it has no grouped heads."""
    q, k, v = params.query, params.key, params.value
    least = 4 if q.dtype == torch.float32 else 8
    return (
        q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and q.shape[1] == k.shape[1] == v.shape[1]
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] % least == v.shape[-1] % least == 0
    )


class Aten:
    """The four operators. ``calls`` are the names of those that ran, ``masked`` how many of them read a bias."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.masked = 0

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout_p: float,
        is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert q.dtype in (torch.float16, torch.bfloat16) and (max_q, max_k) == (q.shape[1], k.shape[1])
        assert q.shape[3] % 8 == 0 and q.shape[2] % k.shape[2] == 0 and dropout_p == 0.0
        assert all(t.stride(-1) == 1 for t in (q, k, v)) and is_causal and not return_debug_mask
        self.calls.append("flash")
        out = formula(q, k, v, lower_right(q, k, window_size_left), scale)
        return out, torch.zeros(q.shape[0], q.shape[2], max_q), torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def _flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: None, cum_k: None,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor, offset: Tensor, *,
        scale: float | None = None, window_size_left: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert grad.shape == out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], max_q)
        self.calls.append("flash backward")
        return differentiated(grad, q, k, v, lower_right(q, k, window_size_left), scale)

    def _efficient_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cum_q: None, cum_k: None, max_q: None, max_k: None,
        dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert q.shape[2] == k.shape[2] == v.shape[2], "no grouped heads"
        assert all(t.stride(-1) == 1 for t in (q, k, v)) and compute_log_sumexp and dropout_p == 0.0
        self.calls.append("efficient")
        out, seed = formula(q, k, v, self._visible(q, k, bias, custom_mask_type), scale), torch.zeros(1)
        return out, torch.zeros(q.shape[0], q.shape[2], q.shape[1]), seed, seed, q.shape[1], k.shape[1]

    def _efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, cum_q: None, cum_k: None,
        max_q: int, max_k: int, lse: Tensor, dropout_p: float, seed: Tensor, offset: Tensor, custom_mask_type: int,
        bias_requires_grad: bool, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert grad.shape == out.shape == q.shape and (max_q, max_k) == (q.shape[1], k.shape[1])
        self.calls.append("efficient backward")
        return *differentiated(grad, q, k, v, self._visible(q, k, bias, custom_mask_type), scale), None

    def _visible(self, q: Tensor, k: Tensor, bias: Tensor | None, custom_mask_type: int) -> Tensor:
        """What is added to the scores [b | 1, heads | 1, rows, columns]."""
        if bias is None:
            assert custom_mask_type == LOWER_RIGHT
            return lower_right(q, k, None)
        self.masked += 1
        assert custom_mask_type == 0 and bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        assert bias.dtype == q.dtype and bias.stride(-1) == 1 and bias.stride(-2) % 16 == 0, (
            "rows are loaded in vectors"
        )
        return bias


def lower_right(q: Tensor, k: Tensor, left: int | None) -> Tensor:
    """Added to scores: row r sees columns up to its own, which is aligned to the lower right; ``left``: so many before it."""
    own, column = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    hidden = (column > own) | (column < own - (k.shape[1] if left is None else left))
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))


def formula(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None) -> Tensor:
    """Attention of [b, rows, heads, d]; rows that see nothing are zero."""
    groups, dtype = q.shape[2] // k.shape[2], q.dtype
    q, k, v = (t.transpose(1, 2).double() for t in (q, k, v))
    k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + added.double()
    empty = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ v).to(dtype).transpose(1, 2)


def differentiated(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None
) -> tuple[Tensor, ...]:
    """Gradients of the formula's q, k and v."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(formula(*leaves, added, scale), leaves, grad)
