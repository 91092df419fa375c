"""Documents packed into the rows of a micro-batch: their boundaries, the positions of their tokens, and padding.

A token sees the tokens of its own document up to itself. All of it is kept as runs of tokens, a few numbers for each
document; there is no mask of tokens by tokens. The first stage finds the documents in its inputs, and the step's header
brings them to the other stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_terapipe.pipeline.slicing import Span

PADDING = 0  # tokens that no other token sees, and whose outputs do not matter
COUNTED_PADDING = -1  # padding whose outputs matter: it sees all documents of its row so far


class Segment(NamedTuple):
    """Tokens ``[start, stop)`` of a slice, of one document; ``first``: the document's first key among the layout's."""

    start: int
    stop: int
    first: int
    is_padding: bool


class RowLayout:
    """Documents of a slice in one row, or in several rows that are alike.

    Args:
        rows: rows of the micro-batch.
        before: number of the layout's keys before the slice.
        segments: [n, 4] int32, as `Segment`.
        mask: bool [1, 1, slice, before + slice], True for keys that a token may see besides causality; only for padding
            inside a document, which is no segment. None elsewhere.
    """

    def __init__(self, rows: slice, before: int, segments: Tensor, mask: Tensor | None = None) -> None:
        self.rows, self.before, self.mask, self._segments = rows, before, mask, segments
        self._cumulative: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def segments(self) -> list[Segment]:
        """Return the segments in order."""
        return [
            Segment(start, stop, first, bool(is_padding)) for start, stop, first, is_padding in self._segments.tolist()
        ]

    @property
    def first(self) -> int:
        """First key of the first segment, among the layout's."""
        return int(self._segments[0, 2])

    @property
    def longest(self) -> tuple[int, int]:
        """Largest numbers of queries and of keys of a segment."""
        start, stop, first = self._segments[:, :3].T
        return int((stop - start).max()), int((self.before + stop - first).max())

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ends of the segments' queries and keys, counted from 0 and ``first``: [n + 1] int32 each."""
        if device not in self._cumulative:
            ends = torch.cat([torch.zeros(1, dtype=torch.int32), self._segments[:, 1]])
            keys = ends + (self.before - self.first)
            keys[0] = 0
            self._cumulative[device] = ends.to(device), keys.to(device)
        return self._cumulative[device]


class Layout(NamedTuple):
    """Documents of a slice: its attention reads keys from ``first`` on, row by row as ``rows`` say."""

    first: int
    rows: tuple[RowLayout, ...]

    @property
    def is_one_document(self) -> bool:
        """Whether all rows have one document, which begins with the first key."""
        row = self.rows[0]
        return (
            len(self.rows) == 1 and row.mask is None and len(row.segments()) == 1 and not row.segments()[0].is_padding
        )


class Documents:
    """Documents of a micro-batch.

    Args:
        runs: for each row, tokens whose positions and document go on from the one before: [3, n] int32, the first token of
            each run, its position, and the number of its document, or `PADDING`, or `COUNTED_PADDING`.
        total: number of tokens in a row.
    """

    def __init__(self, runs: Sequence[Tensor], total: int) -> None:
        self.runs, self.total = list(runs), total
        self._last: tuple[Span, Layout] | None = None  # the layout of the running slice, for all layers
        self._on: dict[torch.device, Tensor] = {}

    @classmethod
    def of(cls, numbers: Tensor, positions: Tensor | None = None) -> Documents | None:
        """Return the documents of tokens, or None if each row is one document at positions 0, 1, 2, ...

        Args:
            numbers: number of each token's document, from 1 on, [b, S]; or `PADDING`, or `COUNTED_PADDING`.
            positions: position of each token, [b, S]; None: 0, 1, 2, ...
        """
        numbers, index = numbers.cpu(), torch.arange(numbers.shape[1])
        positions = index.expand_as(numbers) if positions is None else positions.cpu()
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = (numbers.diff(dim=1) != 0) | ((positions - index).diff(dim=1) != 0)
        if not bool(begins[:, 1:].any()) and bool((numbers > 0).all()) and not bool(positions[:, 0].any()):
            return None
        rows = zip(begins, positions, numbers, strict=True)
        return cls([torch.stack([index[b], p[b], n[b]]).int() for b, p, n in rows], numbers.shape[1])

    def pack(self) -> Tensor:
        """Return the documents as one tensor of int32; `unpack` is the inverse."""
        counts = [self.total, len(self.runs), *(runs.shape[1] for runs in self.runs)]
        return torch.cat([torch.tensor(counts, dtype=torch.int32), *(runs.flatten() for runs in self.runs)])

    @classmethod
    def unpack(cls, packed: Tensor) -> Documents:
        """Return the documents that `pack` has packed."""
        total, rows = packed[:2].tolist()
        sizes = [3 * count for count in packed[2 : 2 + rows].tolist()]
        parts = packed[2 + rows : 2 + rows + sum(sizes)].split(sizes)
        return cls([part.reshape(3, -1).clone() for part in parts], total)

    @property
    def used(self) -> int:
        """Number of tokens up to the last one, of any row, that is not padding."""
        return max(int(runs[0, -1]) if int(runs[2, -1]) == PADDING else self.total for runs in self.runs)

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each token, [b, S] int64."""
        if device not in self._on:
            index = torch.arange(self.total)
            rows = [index + _spread(runs[1] - runs[0], runs[0], self.total) for runs in self.runs]
            self._on[device] = torch.stack(rows).to(device)
        return self._on[device]

    def layout(self, span: Span) -> Layout:
        """Return the documents of a slice."""
        if self._last is None or self._last[0] != span:
            self._last = span, self._layout(span)
        return self._last[1]

    def _layout(self, span: Span) -> Layout:
        found = [_row(runs, span, self.total) for runs in self.runs]
        first = min(int(segments[0, 2]) for segments, _ in found)
        rows: list[RowLayout] = []
        for index, (segments, mask) in enumerate(found):
            start = index
            if index and mask is None and found[index - 1][1] is None and torch.equal(segments, found[index - 1][0]):
                start = rows.pop().rows.start
            relative = segments - segments.new_tensor([0, 0, first, 0])
            seen = None if mask is None else mask[..., first:]
            rows.append(RowLayout(slice(start, index + 1), span.start - first, relative, seen))
        return Layout(first, tuple(rows))


def _spread(values: Tensor, starts: Tensor, total: int) -> Tensor:
    """Repeat the value of each run for all of its tokens, [total] int64."""
    lengths = torch.diff(starts, append=starts.new_tensor([total]))
    return torch.repeat_interleave(values.long(), lengths)


def _row(runs: Tensor, span: Span, total: int) -> tuple[Tensor, Tensor | None]:
    """Return the segments of a row in a slice, keys counted from 0, and its mask if it needs one."""
    begins = torch.ones(runs.shape[1], dtype=torch.bool)
    begins[1:] = runs[2].diff() != 0  # a document may have several runs of positions
    starts, numbers = runs[0, begins], runs[2, begins]
    if len(numbers) > 1 and numbers[-1] == PADDING:  # seen by no token before it, and so no document of its own
        starts, numbers = starts[:-1], numbers[:-1]
    documents = numbers[numbers > 0]
    if bool((numbers == COUNTED_PADDING).any()) or len(documents.unique()) < len(documents):
        of_keys = _spread(numbers, starts, total)[: span.stop]
        of_rows = of_keys[span.start :, None]
        mask = (of_keys > 0) & ((of_keys == of_rows) | (of_rows <= 0))
        return torch.tensor([[0, span.length, 0, False]], dtype=torch.int32), mask[None, None]
    stops = torch.cat([starts[1:], starts.new_tensor([total])])
    here = (starts < span.stop) & (stops > span.start)
    starts, stops, padding = starts[here], stops[here], numbers[here] == PADDING
    queries = (starts.clamp(min=span.start) - span.start, stops.clamp(max=span.stop) - span.start)
    firsts = starts.where(~padding, starts.clamp(min=span.start))
    return torch.stack([*queries, firsts, padding.to(starts.dtype)], dim=1), None
