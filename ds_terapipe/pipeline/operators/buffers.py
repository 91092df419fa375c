"""Keys, values and their gradients of one attention call, shared by the slices of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_terapipe.pipeline.slicing import Span


class AttentionState:
    """Buffers of one attention call of one micro-batch: K, V in the model's dtype, dK, dV in fp32 or wider."""

    def __init__(self, k: Tensor, v: Tensor, total: int, compiled: Any | None = None) -> None:
        self.k = k.new_empty((*k.shape[:2], total, k.shape[3]), requires_grad=False)
        self.v = v.new_empty((*v.shape[:2], total, v.shape[3]), requires_grad=False)
        self._form = _form(k, v)
        self.gradients = KeyGradients(total) if compiled is None else compiled.KeyGradients(total)
        self.filled = 0

    def fits(self, k: Tensor, v: Tensor) -> bool:
        """Whether a slice's ``k`` and ``v`` have the buffers' shape and dtype."""
        return self._form == _form(k, v)

    def awaits(self, k: Tensor, v: Tensor, span: Span) -> bool:
        """Whether the buffers hold keys and values of this form for the slice, and its backward is still to come."""
        return self.fits(k, v) and self.filled >= span.stop and self.gradients.start > span.start

    def differs(self, k: Tensor, v: Tensor, span: Span) -> Tensor:
        """Return whether the buffers hold other keys or values for the slice: a scalar tensor on their device."""
        held = self.keys(span.start, span.stop)
        return _other_bits(held[0], k.detach()).any() | _other_bits(held[1], v.detach()).any()

    def write(self, k: Tensor, v: Tensor, span: Span) -> None:
        """Store the slice's keys and values [b, kv heads, slice, d]."""
        keys, values = self.keys(span.start, span.stop)
        keys.copy_(k)
        values.copy_(v)
        self.filled = max(self.filled, span.stop)

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of tokens ``start`` to ``stop``."""
        return self.k.narrow(2, start, stop - start), self.v.narrow(2, start, stop - start)


class KeyGradients:
    """dK and dV of an attention call over ``total`` tokens, summed over its slices.

    Attributes:
        start: gradients of tokens from here on were returned.
    """

    def __init__(self, total: int) -> None:
        self.start = self._total = total
        self._dk: Tensor | None = None
        self._dv: Tensor | None = None

    def add(self, dk: Tensor, dv: Tensor, start: int, stop: int, first: int) -> tuple[Tensor, Tensor]:
        """Add the share of the slice ``start`` to ``stop``; return the slice's own rows.

        These are complete. The first share of a sequence becomes the buffers, so the caller must not use ``dk`` and
        ``dv`` afterwards.

        Args:
            dk, dv: [b, kv heads, stop - first, d], of keys from ``first`` on.
        """
        length = stop - start
        if self._dk is None or self._dv is None:
            wide = torch.float64 if dk.dtype == torch.float64 else torch.float32
            missing = (0, 0, first, self._total - stop)
            self._dk, self._dv = (F.pad(t.to(wide), missing) if any(missing) else t.to(wide) for t in (dk, dv))
            own_k, own_v = self._dk.narrow(2, start, length), self._dv.narrow(2, start, length)
        else:
            own_k, own_v = self._dk.narrow(2, start, length), self._dv.narrow(2, start, length)
            if self.start <= start:
                # returned before: two calls over identical keys and values may have been recomputed into one state
                own_k.zero_()
                own_v.zero_()
            self._dk.narrow(2, first, stop - first).add_(dk)
            self._dv.narrow(2, first, stop - first).add_(dv)
        self.start = start
        return own_k.to(dk.dtype, copy=True), own_v.to(dv.dtype, copy=True)


def _form(k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Return what the keys and values of all slices have in common."""
    (batch, heads, _, size), (v_batch, v_heads, _, v_size) = k.shape, v.shape
    return batch, heads, size, k.dtype, v_batch, v_heads, v_size, v.dtype


def _other_bits(a: Tensor, b: Tensor) -> Tensor:
    # bits, not numbers: after an overflow there are NaNs, and the loss scaler skips the step
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.view(whole) != b.view(whole)
