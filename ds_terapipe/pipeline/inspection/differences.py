"""Differences of what goes in and out of the modules of a layer, between a slice and the whole sequence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_terapipe.pipeline.slicing import Span

# largest difference of a token's vector, relative to its length, that is rounding within one layer
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
TOLERANCE |= {dtype.to_complex(): TOLERANCE[dtype] for dtype in (torch.float64, torch.float32)}
_TINY = 1e-30


class Record(NamedTuple):
    """Inputs or output of one call of one module, and the tolerance between two runs."""

    module: str
    what: str
    tensors: tuple[Tensor, ...]
    tolerance: float


class Difference(NamedTuple):
    """Difference of a tensor between a slice and the whole sequence; ``place``: which of the layer's it is."""

    place: int
    text: str
    error: float
    tolerance: float

    @property
    def is_certain(self) -> bool:
        """Whether it is larger than rounding."""
        return self.error > self.tolerance


def first_above(found: Iterable[Difference], close: float = math.inf) -> Difference | None:
    """Return the first difference that is above its tolerance, or above ``close``."""
    return next((each for each in found if each.error > min(each.tolerance, close)), None)


def largest(of_ranks: Sequence[list[Difference]]) -> list[Difference]:
    """Return the largest difference of all ranks at each place; of ranks with fewer places, whose form differs, those."""
    fewest = min(map(len, of_ranks))
    return [
        max(alike, key=lambda each: each.error)
        for alike in zip(*(f for f in of_ranks if len(f) == fewest), strict=True)
    ]


def differences(layer: str, expected: list[Record], got: list[Record], span: Span, batch: int) -> list[Difference]:
    """Return the differences of all tensors between a slice and the whole sequence, in the order of the run."""

    def of_form(text: str) -> list[Difference]:
        return [*found, Difference(len(found), text, math.inf, 0.0)]

    found: list[Difference] = []
    # an expert without tokens of a slice may be left out; what that changes shows in the layer's output
    calls, of_slice = (Counter(record[:2] for record in records) for records in (expected, got))
    expected, got = ([r for r in records if calls[r[:2]] == of_slice[r[:2]]] for records in (expected, got))
    if [record[:2] for record in expected] != [record[:2] for record in got]:
        return of_form(
            f"{layer} calls other modules for tokens {span.start} to {span.stop} than for the whole sequence"
        )
    for a, b in zip(expected, got, strict=True):
        where = f"the {a.what} of {layer}" + (f", module {a.module}," if a.module else "")
        if len(a.tensors) != len(b.tensors):
            return of_form(
                f"{where} is {len(b.tensors)} tensors for a slice and {len(a.tensors)} for the whole sequence"
            )
        for whole, part in zip(a.tensors, b.tensors, strict=True):
            candidates = list(_corresponding(whole, part, span, batch))
            if not candidates:
                if a.module:
                    continue  # unknown layout; its effect is compared in later modules
                return of_form(
                    f"{where} has shape {list(part.shape)} for {span.length} tokens, {list(whole.shape)} for all"
                )
            error = min(difference(piece, part, row) for piece, row in candidates)
            between = f"between slice and whole sequence (tokens {span.start} to {span.stop})"
            tolerance = max(a.tolerance, TOLERANCE.get(part.dtype, 0.0))
            found.append(Difference(len(found), f"{where} differs by {error:.1e} {between}", error, tolerance))
    return found


def _corresponding(whole: Tensor, part: Tensor, span: Span, batch: int) -> Iterator[tuple[Tensor, int | None]]:
    """Yield the parts of ``whole`` that may correspond to ``part``, with the dimension of the tokens."""
    if whole.dim() != part.dim() or whole.dtype != part.dtype:
        return
    changed = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    if not changed:
        yield whole, None
        return
    piece, row = whole, None
    for d in changed:
        sizes = (whole.shape[d], part.shape[d])
        if sizes == (span.total, span.length):
            piece, row = piece.narrow(d, span.start, span.length), d
        elif sizes == (span.total, span.stop):
            piece = piece.narrow(d, 0, span.stop)
        elif len(changed) == 1 and sizes == (batch * span.total, batch * span.length):
            for shape, inner in (((batch, span.total), d + 1), ((span.total, batch), d)):
                tokens = whole.unflatten(d, shape).narrow(inner, span.start, span.length)
                yield tokens.reshape(part.shape), d
            return
        else:
            return
    yield piece, row


def difference(whole: Tensor, part: Tensor, row: int | None) -> float:
    """Return the largest relative difference over tokens; 1 for different integers."""
    if part.is_complex():
        whole, part = torch.view_as_real(whole.resolve_conj()), torch.view_as_real(part.resolve_conj())
    if not part.is_floating_point():
        return float(not torch.equal(whole, part))
    wide = torch.float64 if part.dtype == torch.float64 else torch.float32
    a, b = whole.to(wide), part.to(wide)
    same = a == b  # also if both are infinite
    difference = torch.where(same, 0.0, a - b)
    a = torch.where(torch.isfinite(a), a, 0.0)
    if row is None:
        difference, a = difference.reshape(1, -1), a.reshape(1, -1)
    else:
        difference, a = difference.movedim(row, 0).flatten(1), a.movedim(row, 0).flatten(1)
    if difference.numel() == 0:
        return 0.0
    lengths = torch.linalg.vector_norm(a, dim=1)
    floor = max(float(lengths.mean()), _TINY)
    worst = torch.linalg.vector_norm(difference, dim=1) / lengths.clamp(min=floor)
    return float(torch.nan_to_num(worst, nan=float("inf")).max())
