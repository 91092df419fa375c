"""Weights of linear layers in the layout in which the matrix library multiplies, made while a stage waits.

A library packs a weight before it multiplies by it. Where a micro-batch is cut that is done once per slice, for fewer rows
each time. Here a stage packs its weights once a step, and if it can when it has nothing else to do: while the first message of
the step is on its way. The price is memory, one more copy of the weights for each direction.

PyTorch packs in fp32 on a CPU with MKL (operators that its compiler uses for inference); elsewhere nothing happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# So many products have to share a layout that is made while nobody waits.
_PAYS = 4


class _Use(NamedTuple):
    """A weight [out, in] and how many rows it multiplies for each token of a slice: the sequences of a micro-batch.

    0 rows where it is not the same number each time.
    """

    weight: Tensor
    rows_per_token: int


class _Packed(NamedTuple):
    """A matrix packed for products of [rows, columns], and the state of the weight that it was made from."""

    layout: Tensor
    operand: tuple[int, int]
    made_from: tuple[Any, ...]


class Layouts:
    """The packed weights of one direction: for ``x @ weight.T``, or transposed for ``gradient @ weight``."""

    def __init__(self, transposed: bool) -> None:
        self.valid = False
        self._transposed = transposed
        self._packed: dict[int, _Packed] = {}

    def make(self, uses: Iterable[_Use], tokens: int) -> None:
        """Pack for slices of so many tokens.

        Each layout takes the place of the last step's: freed all at once, they would go back to the system, and come again
        page by page.
        """
        last, self._packed, self.valid = self._packed, {}, True
        for weight, rows_per_token in uses:
            last.pop(id(weight), None)
            rows = rows_per_token * tokens
            if rows:
                matrix = weight.detach().t() if self._transposed else weight.detach()
                layout = torch.ops.mkl._mkl_reorder_linear_weight(matrix, rows)
                self._packed[id(weight)] = _Packed(layout, (rows, matrix.shape[1]), _state(weight))

    def find(self, weight: Tensor, x: Tensor) -> Tensor | None:
        """The weight's layout, where there is one for ``x`` [..., columns] and of the weight as it is."""
        found = self._packed.get(id(weight)) if self.valid else None
        if found is None or found.operand != (_rows(x), x.shape[-1]) or found.made_from != _state(weight):
            return None
        return found.layout if x.dtype == torch.float32 else None

    def free(self) -> None:
        """Let the layouts go."""
        self._packed, self.valid = {}, False


class PackedWeights:
    """The packed weights of a step: those that the step before has used, for the length that most of this one's slices have.

    Args:
        wanted: False: nothing is ever packed.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted and is_available()
        self._known: dict[int, _Use] = {}
        self._seen: dict[int, _Use] = {}
        self._tokens = self._slices = 0
        self._forward, self._backward = Layouts(transposed=False), Layouts(transposed=True)

    def begin(self, lengths: Sequence[int]) -> None:
        """A step begins whose slices have these lengths, those of micro-batches that are not cut left out."""
        self.end()
        if self._seen:
            self._known, self._seen = self._seen, {}
        self._tokens, self._slices = max(Counter(lengths).items(), key=lambda item: item[1], default=(0, 0))
        if 2 * self._slices <= len(lengths):  # a layout is for one number of rows: too few would gain by it
            self._slices = 0
            self._forward.free()
            self._backward.free()

    def end(self) -> None:
        """The step is over: the weights change."""
        self._slices = 0
        self._forward.valid = self._backward.valid = False

    def note(self, weight: Tensor, x: Tensor, tokens: int) -> None:
        """A slice of so many tokens multiplies ``x`` [..., in] with the weight [out, in]."""
        if not (self._wanted and weight.dtype == torch.float32 and weight.device.type == "cpu"):
            return
        per_token, rest = divmod(_rows(x), tokens)
        before = self._seen.get(id(weight))
        same = not rest and (before is None or before.rows_per_token == per_token)
        self._seen[id(weight)] = _Use(weight, per_token if same else 0)

    def due(self, forward: bool, backward: bool, waiting: bool) -> list[Layouts]:
        """What to pack before an action: of what it asks for all that this step does not have yet, if that pays.

        Args:
            forward, backward: the directions that are about to be used.
            waiting: the action waits for a message, so that there is nothing else to do.
        """
        if self._slices < (2 if waiting else _PAYS) or not self._known:
            return []
        asked = ((self._forward, forward), (self._backward, backward))
        return [layouts for layouts, wanted in asked if wanted and not layouts.valid]

    def pack(self, due: Iterable[Layouts]) -> None:
        """Pack what is due."""
        for layouts in due:
            layouts.make(self._known.values(), self._tokens)

    @property
    def most_bytes(self) -> int:
        """What the layouts of both directions take once all weights that were seen are packed."""
        weights = (use.weight for use in {**self._known, **self._seen}.values())
        return 2 * sum(weight.numel() * weight.element_size() for weight in weights)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """``F.linear``; None where the weight is not packed."""
        packed = self._forward.find(weight, x)
        return None if packed is None else torch.ops.mkl._mkl_linear(x, packed, weight, bias, _rows(x))

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor | None:
        """``gradient @ weight``; None where the weight is not packed."""
        packed = self._backward.find(weight, gradient)
        return (
            None if packed is None else torch.ops.mkl._mkl_linear(gradient, packed, weight.t(), None, _rows(gradient))
        )


def is_available() -> bool:
    """Whether this PyTorch can pack weights."""
    needed = ("_mkl_linear", "_mkl_reorder_linear_weight")
    return torch.backends.mkl.is_available() and all(hasattr(torch.ops.mkl, name) for name in needed)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.numel() else 0


def _state(weight: Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight._version, weight.shape, weight.stride()
