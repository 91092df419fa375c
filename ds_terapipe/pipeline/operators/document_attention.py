"""Attention of a slice of packed documents: a rectangle for each document, or one call of variable lengths on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_terapipe.pipeline.documents import Layout, RowLayout
from ds_terapipe.pipeline.operators import kernels
from ds_terapipe.pipeline.operators.kernels import Call, CudaFlash, Formula, Gradients, Made

_ATEN = torch.ops.aten


class Part(NamedTuple):
    """Call of ``kernel`` for some rows, queries and keys of a slice; they overlap with those of no other part."""

    kernel: type[Formula]
    rows: slice
    queries: slice
    keys: slice
    mask: Tensor | None
    call: Call


class DocumentAttention(Formula):
    """Attention by the documents in ``Call.documents``; the keys begin with the layout's first one."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Made:
        """Implement :meth:`Formula.forward`; the output of padding is 0, or finite."""
        assert call.documents is not None
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        saved: list[Tensor] = []
        kept: list[tuple[Part, int, Any]] = []
        for row in call.documents.rows:
            for part in _parts(row, q, k, v, call._replace(documents=None)):
                of_part, tensors, other = part.kernel.forward(*_cut(part, q, k, v), part.mask, part.call)
                out[part.rows, :, part.queries] = of_part
                saved += tensors
                kept.append((part, len(tensors), other))
        return out, tuple(saved), kept

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Implement :meth:`Formula.backward`."""
        dq, dk, dv = grad.new_zeros(*grad.shape[:3], k.shape[3]), torch.zeros_like(k), torch.zeros_like(v)
        start = 0
        for part, count, other in kept:
            of_part, keys, values = _cut(part, grad, k, v)
            tensors, start = saved[start : start + count], start + count
            gradients = part.kernel.backward(of_part, tensors, other, keys, values, part.mask, part.call)
            dq[part.rows, :, part.queries] = gradients.q
            dk[part.rows, :, part.keys] = gradients.k
            dv[part.rows, :, part.keys] = gradients.v
        return Gradients(dq, dk, dv)


def _cut(part: Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[part.rows, :, part.queries], k[part.rows, :, part.keys], v[part.rows, :, part.keys]


def _parts(row: RowLayout, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Iterator[Part]:
    """Yield the calls for rows that are alike."""
    length, columns = q.shape[2], k.shape[2]
    inside = q[row.rows], k[row.rows], v[row.rows]
    if row.mask is not None:
        mask = kernels.causal_mask(length, columns, 1, q.dtype, q.device, call.window)
        mask = mask.masked_fill(row.hidden(q.device), float("-inf"))
        whole = call._replace(window=None)
        yield Part(kernels.choose(*inside, mask, whole), row.rows, slice(length), slice(columns), mask, whole)
        return
    if len(row) > 1 and kernels.choose(*inside, None, call) is CudaFlash:
        alone = call._replace(documents=Layout(row.first, (row,)))
        for index in range(row.rows.start, row.rows.stop):
            yield Part(CudaVarlen, slice(index, index + 1), slice(length), slice(row.first, columns), None, alone)
        return
    for start, stop, first, is_padding in row.segments():
        if is_padding:
            continue
        if call.window is not None:
            first = max(first, row.before + start - call.window + 1)
        keys = slice(first, row.before + stop)
        hides = call.window is not None and keys.stop - keys.start > call.window
        this = call if hides else call._replace(window=None)
        part = Part(Formula, row.rows, slice(start, stop), keys, None, this)
        yield part._replace(kernel=kernels.choose(*_cut(part, q, k, v), None, this))


class CudaVarlen(Formula):
    """FlashAttention-2 over the documents of one row, padding among them, as ``torch.nn.attention.varlen`` calls it.

    Its tensors are [tokens, heads, d]. ``Call.documents`` has the row, and the keys begin with its first document.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Made:
        """Implement :meth:`Formula.forward`."""
        assert call.documents is not None
        row = call.documents.rows[0]
        ends, lengths = row.cumulative(q.device), row.longest
        q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
        out, lse, seed, offset, _ = _ATEN._flash_attention_forward(
            q, k, v, *ends, *lengths, call.dropout_p, True, False,
            scale=call.scale, window_size_left=CudaFlash.left(call),
        )  # fmt: skip
        return out.transpose(0, 1)[None], (q, out, lse, seed, offset), None

    @staticmethod
    def backward(
        grad: Tensor, saved: tuple[Tensor, ...], kept: Any, k: Tensor, v: Tensor, mask: Tensor | None, call: Call
    ) -> Gradients:
        """Implement :meth:`Formula.backward`."""
        assert call.documents is not None
        row = call.documents.rows[0]
        q, out, lse, seed, offset = saved
        ends, lengths = row.cumulative(q.device), row.longest
        grad, k, v = (t[0].transpose(0, 1) for t in (grad, k, v))
        gradients = _ATEN._flash_attention_backward(
            grad, q, k, v, out, lse, *ends, *lengths, call.dropout_p, True, seed, offset,
            scale=call.scale, window_size_left=CudaFlash.left(call),
        )  # fmt: skip
        return Gradients(*(t.transpose(0, 1)[None] for t in gradients))
