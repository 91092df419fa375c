"""Weights of linear layers in the layout in which the matrix library multiplies, made while a stage waits.

A library packs a weight before it multiplies by it. Where a micro-batch is cut that is done once per slice, for fewer rows
each time. Here a stage packs its weights once a step, and if it can when it has nothing else to do: while the first message of
the step is on its way. The price is memory, one more copy of the weights for each direction.

PyTorch packs in fp32 on a CPU with MKL (operators that its compiler uses for inference); elsewhere nothing happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# So many products have to share a layout that is made while nobody waits.
_PAYS = 4


class _Use(NamedTuple):
    """A weight [out, in] and how many rows it multiplies for each token of a slice: the sequences of a micro-batch."""

    weight: Tensor
    rows_per_token: int


class _Packed(NamedTuple):
    """A matrix packed for products with so many rows, and the state of the weight that it was made from."""

    layout: Tensor
    rows: int
    made_from: tuple[int, int]


class PackedWeights:
    """The packed weights of a step. What they are is known from the steps before, which cut is used from the step itself.

    Args:
        wanted: False: nothing is ever packed.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted and is_available()
        self._known: dict[int, _Use] = {}
        self._seen: dict[int, _Use] = {}
        self._tokens = self._slices = 0
        self._forward, self._backward = _Direction(), _Direction()

    def begin(self, lengths: Iterable[int]) -> None:
        """A step begins whose slices have these lengths, those of micro-batches that are not cut left out."""
        self.end()
        if self._seen:
            self._known, self._seen = self._seen, {}
        # a layout is for one number of rows: that of the most frequent length, if there are two of it
        self._tokens, self._slices = max(Counter(lengths).items(), key=lambda item: item[1], default=(0, 0))

    def end(self) -> None:
        """The step is over: the weights change."""
        self._forward.valid = self._backward.valid = False

    def note(self, weight: Tensor, x: Tensor, tokens: int) -> None:
        """A slice of so many tokens multiplies ``x`` [..., in] with the weight [out, in]."""
        rows = _rows(x)
        if self._wanted and weight.dtype == torch.float32 and weight.device.type == "cpu" and rows % tokens == 0:
            self._seen[id(weight)] = _Use(weight, rows // tokens)

    def pack_forward(self, waiting: bool) -> None:
        """Pack for ``x @ weight.T``, unless that was done in this step; ``waiting``: there is nothing else to do."""
        if self._slices >= (2 if waiting else _PAYS) and not self._forward.valid:
            self._forward.pack((w, w, rows * self._tokens) for w, rows in self._known.values())

    def pack_backward(self) -> None:
        """Pack for ``gradient @ weight``, unless that was done in this step."""
        if self._slices >= 2 and not self._backward.valid:
            self._backward.pack((w, w.t(), rows * self._tokens) for w, rows in self._known.values())

    @property
    def most_bytes(self) -> int:
        """What the layouts of both directions take, of the weights that are known."""
        weights = (use.weight for use in {**self._known, **self._seen}.values())
        return 2 * sum(weight.numel() * weight.element_size() for weight in weights)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear``, with the weight packed where it is."""
        packed = self._forward.find(weight, x)
        if packed is None:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.ops.mkl._mkl_linear(x, packed, weight, bias, _rows(x))

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """``gradient @ weight``, with the weight packed where it is."""
        packed = self._backward.find(weight, gradient)
        if packed is None:
            return gradient @ weight
        return torch.ops.mkl._mkl_linear(gradient, packed, weight.t(), None, _rows(gradient))


class _Direction:
    """The packed weights of one direction."""

    def __init__(self) -> None:
        self.valid = False
        self._packed: dict[int, _Packed] = {}

    def pack(self, wanted: Iterable[tuple[Tensor, Tensor, int]]) -> None:
        """Pack (weight, the weight or its transpose, rows).

        Each layout takes the place of the last step's: freed all at once, they would go back to the system, and come again
        page by page.
        """
        last, self._packed, self.valid = self._packed, {}, True
        for weight, matrix, rows in wanted:
            last.pop(id(weight), None)
            layout = torch.ops.mkl._mkl_reorder_linear_weight(matrix.detach(), rows)
            self._packed[id(weight)] = _Packed(layout, rows, _state(weight))

    def find(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """The weight's layout, where there is one for these rows and of the weight as it is."""
        found = self._packed.get(id(weight)) if self.valid else None
        if found is None or found.rows != _rows(x) or found.made_from != _state(weight) or x.dtype != torch.float32:
            return None
        return found.layout


def is_available() -> bool:
    """Whether this PyTorch can pack weights."""
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _state(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version
