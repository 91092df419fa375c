"""Documents packed into the rows of a micro-batch: their boundaries, the positions of their tokens, and padding.

A token sees the tokens of its own document up to itself. All of it is kept as runs of tokens, a few numbers for each
document, on the host; there is no mask of tokens by tokens. The first stage finds the documents in its inputs, and the
step's header brings them to the other stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_terapipe.pipeline.slicing import Span

PADDING = 0  # tokens that no other token sees, and whose outputs do not matter
COUNTED_PADDING = -1  # padding whose outputs matter: it sees all documents of its row so far

Numbers = npt.NDArray[np.int32]


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
        segments: [n, 4], as `Segment`.
        mask: bool [1, 1, slice, before + slice], True for keys that a token may see besides causality; only for padding
            inside a document, which is no segment. None elsewhere.
    """

    def __init__(self, rows: slice, before: int, segments: Numbers, mask: Tensor | None = None) -> None:
        self.rows, self.before, self.mask, self._segments = rows, before, mask, segments
        self._cumulative: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._hidden: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        """Number of segments."""
        return len(self._segments)

    def segments(self) -> list[Segment]:
        """Return the segments in order."""
        return [Segment(start, stop, first, padding > 0) for start, stop, first, padding in self._segments.tolist()]

    @property
    def first(self) -> int:
        """First key of the first segment, among the layout's."""
        return int(self._segments[0, 2])

    @property
    def longest(self) -> tuple[int, int]:
        """Largest numbers of queries and of keys of a segment."""
        start, stop, first, _ = self._segments.T
        return int((stop - start).max()), int((self.before + stop - first).max())

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the ends of the segments' queries and keys, counted from 0 and ``first``: [n + 1] int32 each."""
        if device not in self._cumulative:
            queries = np.concatenate([[0], self._segments[:, 1]])
            keys = np.concatenate([[0], self._segments[:, 1] + self.before - self.first])
            self._cumulative[device] = _on(device, queries.astype(np.int32)), _on(device, keys.astype(np.int32))
        return self._cumulative[device]

    def hidden(self, device: torch.device) -> Tensor:
        """Return the opposite of ``mask`` on a device: copied once for all layers, and the host does not wait."""
        assert self.mask is not None
        if device not in self._hidden:
            self._hidden[device] = _on(device, ~self.mask.numpy())
        return self._hidden[device]


class Layout(NamedTuple):
    """Documents of a slice: its attention reads keys from ``first`` on, row by row as ``rows`` say."""

    first: int
    rows: tuple[RowLayout, ...]

    @property
    def is_one_document(self) -> bool:
        """Whether all rows have one document, which begins with the first key."""
        row = self.rows[0]
        return len(self.rows) == len(row) == 1 and row.mask is None and not row.segments()[0].is_padding


class Documents:
    """Documents of a micro-batch.

    Args:
        runs: for each row, tokens whose positions and document go on from the one before: [3, n] int32, the first token of
            each run, its position, and the number of its document, or `PADDING`, or `COUNTED_PADDING`.
        total: number of tokens in a row.
    """

    def __init__(self, runs: Sequence[Numbers], total: int) -> None:
        self.runs, self.total = list(runs), total
        self._last: tuple[Span, Layout] | None = None  # the layout of the running slice, for all layers
        self._positions: dict[torch.device, Tensor] = {}

    @classmethod
    def of(cls, numbers: Tensor, positions: Tensor | None = None) -> Documents | None:
        """Return the documents of tokens, or None if each row is one document at positions 0, 1, 2, ...

        Args:
            numbers: number of each token's document, from 1 on, [b, S]; or `PADDING`, or `COUNTED_PADDING`.
            positions: position of each token, [b, S]; None: 0, 1, 2, ...
        """
        number, index = numbers.cpu().numpy(), np.arange(numbers.shape[1])
        position = np.broadcast_to(index, number.shape) if positions is None else positions.cpu().numpy()
        begins = np.ones(number.shape, dtype=bool)
        begins[:, 1:] = (np.diff(number) != 0) | (np.diff(position) != 1)
        if not begins[:, 1:].any() and (number > 0).all() and not position[:, 0].any():
            return None
        rows = zip(begins, position, number, strict=True)
        return cls([np.stack([index[b], p[b], n[b]]).astype(np.int32) for b, p, n in rows], len(index))

    @property
    def used(self) -> int:
        """Number of tokens up to the last one, of any row, that is not padding."""
        return max(int(runs[0, -1]) if runs[2, -1] == PADDING else self.total for runs in self.runs)

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each token, [b, S] int64."""
        if device not in self._positions:
            rows = [_spread(runs[1] - runs[0], runs[0], self.total) for runs in self.runs]
            self._positions[device] = _on(device, np.stack(rows) + np.arange(self.total))
        return self._positions[device]

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
            if index and mask is None and found[index - 1][1] is None and np.array_equal(segments, found[index - 1][0]):
                start = rows.pop().rows.start
            relative = segments - np.array([0, 0, first, 0], dtype=np.int32)
            seen = None if mask is None else torch.from_numpy(mask[None, None, :, first:])
            rows.append(RowLayout(slice(start, index + 1), span.start - first, relative, seen))
        return Layout(first, tuple(rows))


def _spread(values: Numbers, starts: Numbers, total: int) -> npt.NDArray[Any]:
    """Repeat the value of each run for all of its tokens, [total]."""
    return np.repeat(values, np.diff(starts, append=total))


def _row(runs: Numbers, span: Span, total: int) -> tuple[Numbers, npt.NDArray[np.bool_] | None]:
    """Return the segments of a row in a slice, keys counted from 0, and its mask if it needs one."""
    begins = np.diff(runs[2], prepend=runs[2, :1] - 1) != 0  # a document may have several runs of positions
    starts, numbers = runs[0, begins], runs[2, begins]
    if len(numbers) > 1 and numbers[-1] == PADDING:  # seen by no token before it, and so no document of its own
        starts, numbers = starts[:-1], numbers[:-1]
    documents = numbers[numbers > 0]
    if (numbers == COUNTED_PADDING).any() or len(np.unique(documents)) < len(documents):
        of_keys = _spread(numbers, starts, total)[: span.stop]
        of_rows = of_keys[span.start :, None]
        mask = (of_keys > 0) & ((of_keys == of_rows) | (of_rows <= 0))
        return np.array([[0, span.length, 0, 0]], dtype=np.int32), mask
    stops = np.append(starts[1:], np.int32(total))
    here = (starts < span.stop) & (stops > span.start)
    starts, stops, padding = starts[here], stops[here], numbers[here] == PADDING
    inside = np.maximum(starts, span.start)
    firsts = np.where(padding, inside, starts)
    return np.stack([inside - span.start, np.minimum(stops, span.stop) - span.start, firsts, padding], axis=1), None


def _on(device: torch.device, values: npt.NDArray[Any]) -> Tensor:
    """Return the values on a device; the host does not wait for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
