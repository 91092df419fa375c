"""Conversion of tensors to the tables of the back ends: which run of which tensor belongs to which layer.

A layer is what one trust ratio is made for: a parameter of the model, or, where a fused attention matrix is split, the rows
of its queries, keys or values. The columns are those of csrc/lamb/segment.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.modes import Rule, key
from ds_terapipe.optim.op.step_tensors import NOTHING, StepTensors

PARAMETER, GRADIENT, EXP_AVG, EXP_AVG_SQ, COPY, LENGTH, LAYER, KIND = range(8)
TYPE_SHIFTS = (16, 20, 0, 0, 24)  # bits of the types in KIND, by column; moments are fp32, whose type is 0
COUNTED = 28
BYTES = np.array([4, 2, 2])  # of an element, by type
MAX_RULES = 0xFFFF + 1


class View(NamedTuple):
    """The elements of one segment, each a one-dimensional tensor that shares memory with the tensor it is of."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None


@dataclass
class Tables:
    """Input of a back end.

    Attributes:
        segments: int64 [S, 8] in host memory, columns of ``Segment`` in csrc/lamb/segment.h, sorted by layer.
        rules: float64 [R, 12], columns of ``Rule``; on the device of the tensors.
        layers: number of layers L, also those that have no segment here.
        views: the segments' elements as tensors, in the same order, for a back end that takes them.
    """

    segments: Tensor
    rules: Tensor
    layers: int
    views: Sequence[View] = field(default_factory=list)

    def check(
        self, device: torch.device, control: Tensor, norms: Tensor | None = None, ratios: Tensor | None = None
    ) -> None:
        """Refuse arrays that a compiled op cannot take: it sees addresses only.

        Raises:
            ValueError: naming the array.
        """
        check_array("segments", self.segments, 8 * len(self.segments), torch.device("cpu"), torch.int64)
        check_array("rules", self.rules, len(Rule._fields) * len(self.rules), device)
        check_array("control", control, 4, device)
        if norms is not None:
            check_array("norms", norms, 2 * self.layers, device)
        if ratios is not None:
            check_array("ratios", ratios, self.layers, device)


def check_array(
    name: str, array: Tensor, elements: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> None:
    """Refuse an array of another type, size or device. Raises ValueError."""
    if array.dtype != dtype or array.device != device or array.numel() != elements or not array.is_contiguous():
        got = f"{array.dtype} {tuple(array.shape)} on {array.device}"
        raise ValueError(f"{name}: got {got}, must be contiguous {dtype} with {elements} elements on {device}")


class Part(NamedTuple):
    """A run of one of the tensors that the optimizer updates.

    Attributes:
        tensor: index of the tensor.
        offset: first element, counted in the tensor's memory.
        length: elements.
        layer: row of the norms.
        rule: which of the groups' settings apply.
    """

    tensor: int
    offset: int
    length: int
    layer: int
    rule: int


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


class SegmentArrays:
    """The parts of a table as arrays, from which its segments are made at every step.

    Args:
        parts: in any order; sorted by layer here, parts of a layer in the order given.
        counted: for each layer, whether this rank adds its gradient to the global norm.
    """

    def __init__(self, parts: Sequence[Part], counted: Sequence[bool]) -> None:
        rows = sorted(parts, key=lambda part: part.layer)
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), len(Part._fields))
        self.tensor, self.offset, self.length, self.layer, self.rule = columns.T.copy()
        self._counted = np.array(counted, dtype=np.int64)[self.layer] << COUNTED
        self.segments = np.zeros((len(columns), 8), dtype=np.int64)
        self.segments[:, LAYER] = self.layer

    def renew(self, tensors: StepTensors, rows: np.ndarray) -> None:
        """Write the segments of a step; those of tensors without a gradient get length 0.

        Args:
            tensors: the step's.
            rows: row of the rules, int64 [tensors, 2]: for those with decay and trust ratio, and without.
        """
        kind = rows[self.tensor, self.rule] | self._counted
        for column, each in enumerate(tensors.columns):
            first, types = _addresses(each)[self.tensor], tensors.types[column][self.tensor]
            self.segments[:, column] = np.where(first, first + self.offset * BYTES[types], 0)
            kind |= types << TYPE_SHIFTS[column]
        self.segments[:, LENGTH] = np.where(tensors.active[self.tensor], self.length, 0)
        self.segments[:, KIND] = kind

    def views(self, tensors: StepTensors) -> list[View]:
        """Return the elements of the segments."""
        rows = zip(self.tensor.tolist(), self.offset.tolist(), self.segments[:, LENGTH].tolist(), strict=True)
        return [View(*(_flat(column[i], start, length) for column in tensors.columns)) for i, start, length in rows]


def _flat(tensor: Tensor, start: int, length: int) -> Any:
    """Return ``length`` elements from ``start`` on in memory order, sharing memory; None of :data:`NOTHING`."""
    return None if tensor is NOTHING else tensor.as_strided((length,), (1,), tensor.storage_offset() + start)


def _addresses(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return the addresses of tensors, 0 for :data:`NOTHING`, int64 [tensors]."""
    if tensors and tensors[0] is tensors[-1] is NOTHING and all(tensor is NOTHING for tensor in tensors):
        return np.zeros(len(tensors), dtype=np.int64)
    return np.fromiter(map(Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))
