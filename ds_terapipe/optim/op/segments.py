"""Conversion of tensors to the tables of the back ends: which run of which tensor belongs to which layer.

A layer is what one trust ratio is made for: a parameter of the model, or, where a fused attention matrix is split, the rows
of its queries, keys or values. The columns are those of csrc/lamb/segment.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.modes import key

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
PARAMETER, GRADIENT, EXP_AVG, EXP_AVG_SQ, COPY, LENGTH, LAYER, KIND = range(8)
PARAMETER_TYPE, GRADIENT_TYPE, COPY_TYPE, COUNTED = 16, 20, 24, 28
MAX_RULES = 0xFFFF + 1


class View(NamedTuple):
    """The elements of one segment, each a one-dimensional tensor that shares memory with the tensor it is of."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None


class Views(Sequence[View]):
    """Views of all segments, made on demand: only the back end in PyTorch uses them."""

    def __init__(self, make: Callable[[], list[View]]) -> None:
        self._make = make
        self._made: list[View] | None = None

    def forget(self) -> None:
        """The tensors have moved."""
        self._made = None

    def _all(self) -> list[View]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


@dataclass
class Tables:
    """Input of a back end.

    Attributes:
        segments: int64 [S, 8] in host memory, columns of ``Segment`` in csrc/lamb/segment.h, sorted by layer.
        rules: float64 [R, 12], columns of ``Rule``; on the device of the tensors.
        layers: number of layers L, also those that have no segment here.
        views: the segments' elements as tensors, in the same order.
        version: changes whenever ``segments`` does.
    """

    segments: Tensor
    rules: Tensor
    layers: int
    views: Sequence[View] = field(default_factory=list)
    version: int = 0


class Part(NamedTuple):
    """A run of one of the tensors that the optimizer updates.

    Attributes:
        tensor: index of the tensor.
        offset: first element, counted in the tensor's memory.
        length: elements.
        layer: row of the norms.
        rule: which of the groups' settings apply.
        counted: whether this rank adds its gradient to the global norm.
    """

    tensor: int
    offset: int
    length: int
    layer: int
    rule: int
    counted: bool


def rows_pattern(parameter: Tensor, split_qkv: bool) -> tuple[int, ...] | None:
    """``parameter.lamb_rows``: how many rows of dimension 0 go to each sub-layer, a pattern that repeats to the last row.

    Raises:
        ConfigError: if the pattern does not come out even.
    """
    pattern = getattr(parameter, "lamb_rows", None) if split_qkv else None
    if pattern is None:
        return None
    good = isinstance(pattern, (tuple, list)) and len(pattern) > 0
    good = good and all(isinstance(rows, int) and rows > 0 for rows in pattern)
    if not good or parameter.dim() == 0 or parameter.shape[0] % sum(pattern):
        raise ConfigError(
            f"{key('split_qkv')}: got lamb_rows {pattern!r} on a parameter of shape {tuple(parameter.shape)}, must be positive "
            "numbers of rows whose sum divides dimension 0, use e.g. (rows of a head's query, of its key, of its value)"
        )
    return tuple(pattern)


def runs(
    shape: Sequence[int], pattern: tuple[int, ...] | None, start: int, length: int
) -> Iterator[tuple[int, int, int]]:
    """Cut ``length`` elements from ``start`` on, of a contiguous parameter, where the sub-layer changes.

    Yields:
        (sub-layer, first element counted from ``start``, elements), in order and without empty ones.
    """
    if pattern is None:
        yield 0, 0, length
        return
    row = int(np.prod(shape[1:], dtype=np.int64))
    ends = np.cumsum(pattern) * row
    period = int(ends[-1])
    position, stop = start, start + length
    while position < stop and period:
        base, within = position - position % period, position % period
        place = int(np.searchsorted(ends, within, side="right"))
        end = min(base + int(ends[place]), stop)
        yield place, position - start, end - position
        position = end


def memory_strides(tensor: Tensor, in_rows: bool) -> tuple[int, ...]:
    """Strides of the tensors that go with a parameter: its own if it fills its memory, else those of a contiguous one.

    ``in_rows`` asks for the contiguous order, where dimension 0 is cut into sub-layers.
    """
    if in_rows or not fills_memory(tensor):
        return contiguous_strides(tensor.shape)
    return tensor.stride()


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as PyTorch has them: a dimension of no elements counts as one."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def fills_memory(tensor: Tensor) -> bool:
    """Whether the elements lie next to each other in some order of the dimensions, without gap or overlap."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected and tensor.numel():
            return False
        expected *= size
    return True


def flat(tensor: Tensor, offset: int, length: int) -> Tensor:
    """``length`` elements from ``offset`` on in memory order, sharing memory."""
    return tensor.as_strided((length,), (1,), tensor.storage_offset() + offset)


class SegmentArrays:
    """The parts of a table as arrays, from which the segments' addresses are made at every step.

    Args:
        parts: in any order; sorted by layer here, parts of a layer in the order given.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        rows = sorted(parts, key=lambda part: part.layer)
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), len(Part._fields))
        self.tensor, self.offset, self.length, self.layer, self.rule, self.counted = columns.T.copy()
        self.segments = np.zeros((len(columns), 8), dtype=np.int64)
        self.segments[:, LAYER] = self.layer

    def point(self, addresses: dict[int, np.ndarray], sizes: dict[int, np.ndarray], active: np.ndarray) -> bool:
        """Write addresses and lengths.

        Args:
            addresses: column -> address of every tensor's first element, int64 [T], 0 for none.
            sizes: column -> bytes per element, int64 [T].
            active: bool [T]; the segments of the others get length 0.

        Returns:
            Whether anything changed.
        """
        before = self.segments.copy()
        for column, address in addresses.items():
            first = address[self.tensor]
            self.segments[:, column] = np.where(first, first + self.offset * sizes[column][self.tensor], 0)
        self.segments[:, LENGTH] = np.where(active[self.tensor], self.length, 0)
        return not np.array_equal(before, self.segments)

    def kinds(self, rows: np.ndarray, types: dict[int, np.ndarray]) -> bool:
        """Write which rule and which types.

        Args:
            rows: row of the rules, int64 [T, rules of the groups].
            types: bit position -> number of the type, int64 [T].

        Returns:
            Whether anything changed.
        """
        kind = rows[self.tensor, self.rule] | self.counted << COUNTED
        for shift, number in types.items():
            kind |= number[self.tensor] << shift
        changed = not np.array_equal(kind, self.segments[:, KIND])
        self.segments[:, KIND] = kind
        return changed
