"""Weight gradients, made once per micro-batch instead of once per slice.

A slice's weight gradient is a small matrix product, or a few rows of an embedding's table. But its result is as large
as the weight, and must be accumulated. For short slices this traffic is most of the cost of cutting. Here a slice's
backward only makes the gradient of a layer's input, and keeps the operands of the weight's. At the end of the
micro-batch a layer's products are made in succession, while its weight gradient stays in the cache. Layers are
accumulated and freed one by one, as in a backward pass, so at most one layer's gradients exist beside those of the
step. A schedule may ask for those of some slices, or of some layers, before the others. In 16 bits, where each
addition would round, and on GPUs, which prefer large products, it is one product over all tokens. The price is memory:
inputs and output gradients of a micro-batch's layers live until then. (Deferred weight gradients as in zero-bubble
schedules and MEPipe; they remove TeraPipe's fixed cost per slice.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ds_terapipe.pipeline.operators import compiled
from ds_terapipe.pipeline.operators.autograd import apply
from ds_terapipe.pipeline.storages import storage_bytes
from ds_terapipe.pipeline.token_shares import TokenShares
from ds_terapipe.schedule import Unit

# Below, a product takes longer than joining its operands with the next ones.
_LEAST_TOKENS = 128

_OUTSIDE = (
    'token_pipeline.weight_gradients: got "micro_batch" and a model that differentiates its own linear layers '
    '(torch.autograd.grad in its forward?), must leave that to the pipeline, use "slice"'
)

_CHANGED = (
    "token_pipeline.weight_gradients: got an input or output gradient of a linear layer or embedding that was modified in "
    'place during the backward pass, must be left alone until the micro-batch is through, use "slice"'
)

Operands = tuple[Tensor, ...]


class Rule(Protocol):
    """Computes a layer's gradients from the tensors of its slices; equal rules give equal results."""

    @property
    def needs_all(self) -> bool:
        """Whether all slices and one call are needed together: the gradients are no sum over slices and calls."""

    def __call__(self, parameters: Sequence[Tensor], operands: list[Operands]) -> list[Tensor]:
        """Return a gradient for each parameter. May empty ``operands`` meanwhile, to free memory early."""


@dataclass(frozen=True)
class OfLinear:
    """Gradients of a linear layer's weight [out, in] and, as the second parameter, its bias [out].

    Operands: inputs [tokens, in], or this rank's share of them, and the gradient of the outputs [tokens, out].
    """

    shares: TokenShares | None = None
    needs_all: ClassVar[bool] = False

    def __call__(self, parameters: Sequence[Tensor], operands: list[Operands]) -> list[Tensor]:
        products = _joined(operands, self.shares)
        inputs, gradient = next(products)
        made = [gradient.t() @ inputs, *(gradient.sum(0) for _ in parameters[1:])]
        for inputs, gradient in products:
            made[0].addmm_(gradient.t(), inputs)
            for of_bias in made[1:]:
                of_bias += gradient.sum(0)
        return made


@dataclass(frozen=True)
class OfEmbedding:
    """Gradient of an embedding's table [rows, features]; normalised arguments of ``torch.nn.functional.embedding``.

    Operands: indices [tokens] and the gradient of the outputs [tokens, features].
    """

    padding_idx: int = -1
    scale_grad_by_freq: bool = False

    @property
    def needs_all(self) -> bool:
        """Whether gradients are scaled by frequency, which is counted within a call for a whole micro-batch."""
        return self.scale_grad_by_freq

    def __call__(self, parameters: Sequence[Tensor], operands: list[Operands]) -> list[Tensor]:
        rows = parameters[0].shape[0]
        indices, gradient = (_cat(list(each)) for each in zip(*operands, strict=True))
        operands.clear()
        make = torch.ops.aten.embedding_dense_backward
        return [make(gradient, indices, rows, self.padding_idx, self.scale_grad_by_freq)]


class WeightGradients:
    """Inputs and output gradients for the weight gradients of micro-batches in their backward pass.

    Attributes:
        compiled: linear layers in C++; None: they run in Python.
        operands: their operands.
    """

    def __init__(self) -> None:
        self._layers: dict[int, dict[tuple[Rule, tuple[int, ...], int], _Kept]] = defaultdict(dict)
        self._unit: Unit | None = None
        self.compiled = compiled.load()
        self.operands = None if self.compiled is None else self.compiled.Operands(_LEAST_TOKENS, _OUTSIDE, _CHANGED)

    @contextmanager
    def backward(self, unit: Unit) -> Iterator[None]:
        """Context manager around a backward pass of ``unit``: tensors kept in it belong to that slice."""
        self._unit = unit
        if self.operands is not None:
            self.operands.begin(*unit)
        try:
            yield
        finally:
            self._unit = None
            if self.operands is not None:
                self.operands.end()

    def keep(self, rule: Rule, parameters: tuple[Tensor, ...], operands: Operands) -> None:
        """Keep a slice's operands for the gradients of ``parameters``.

        Raises RuntimeError outside the pipeline's own backward passes, where they would never be used.
        """
        if self._unit is None:
            raise RuntimeError(_OUTSIDE)
        layers, call = self._layers[self._unit.micro_batch], 0
        # a tied weight may be used by several rules, or with a bias in one place and without in another
        key = rule, tuple(map(id, parameters)), call
        kept = layers.get(key)
        while kept is not None and rule.needs_all and kept.has(self._unit.slice):
            key = *key[:2], (call := call + 1)
            kept = layers.get(key)
        if kept is None:
            kept = layers[key] = _Kept(rule, parameters)
        kept.add(self._unit.slice, operands)

    def make(self, micro_batch: int, first_slice: int = 0, of: Callable[[Tensor], bool] | None = None) -> None:
        """Make the gradients of a micro-batch and accumulate them like a backward pass: hooks of a parameter run once.

        It is one: of a graph in which each layer is a node, and the layers follow each other.

        Args:
            micro_batch: the micro-batch.
            first_slice: use operands of this slice and later ones, which have run backward; the rest stays.
            of: whether to make the gradients of a layer with this weight; None: those of all layers.
        """
        roots: dict[torch.device, Tensor] = {}
        for kept in reversed(self._kept(micro_batch)):
            weight = kept.parameters[0]
            if kept.has_from(first_slice) and (of is None or of(weight)):
                roots[weight.device] = kept.node(first_slice, roots.get(weight.device))
        if roots:
            torch.autograd.backward(list(roots.values()), [torch.empty_like(root) for root in roots.values()])

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for all micro-batches in their backward pass; tensors that layers share count once."""
        micro_batches = {*self._layers, *(() if self.operands is None else self.operands.micro_batches())}
        layers = (layer for micro_batch in micro_batches for layer in self._kept(micro_batch))
        return sum(storage_bytes(tensor for layer in layers for tensor in layer.tensors()).values())

    def clear(self) -> None:
        """Drop everything, e.g. operands that a failed step has left."""
        self._layers.clear()
        if self.operands is not None:
            self.operands.clear()

    def _kept(self, micro_batch: int) -> list[Any]:
        """Return what the layers of a micro-batch have kept, here and in C++."""
        layers = [] if self.operands is None else self.operands.layers(micro_batch)
        return [*layers, *self._layers.get(micro_batch, {}).values()]


class _Left(NamedTuple):
    """Tensors of one slice in one layer, and their versions."""

    slice: int
    operands: Operands
    versions: tuple[int, ...]


class _Kept:
    """Tensors of a micro-batch's slices in one layer."""

    def __init__(self, rule: Rule, parameters: tuple[Tensor, ...]) -> None:
        self._rule, self.parameters = rule, parameters
        self._left: list[_Left] = []

    def tensors(self) -> Iterator[Tensor]:
        for left in self._left:
            yield from left.operands

    def has(self, index: int) -> bool:
        """Whether the slice of this index has operands."""
        return any(left.slice == index for left in self._left)

    def has_from(self, first_slice: int) -> bool:
        """Whether there are gradients to be made from the operands of this slice and later ones."""
        return any(left.slice >= first_slice for left in self._left) and not (first_slice and self._rule.needs_all)

    def add(self, index: int, operands: Operands) -> None:
        self._left.append(_Left(index, operands, _versions(operands)))

    def node(self, first_slice: int, then: Tensor | None) -> Tensor:
        """Return an empty tensor whose backward makes the gradients, and runs that of ``then`` after it."""
        root: Tensor = apply(_Products, self, first_slice, then, *self.parameters)
        return root

    def take(self, first_slice: int) -> list[Tensor]:
        """Return the parameters' gradients, and free their operands.

        Raises RuntimeError if an operation of PyTorch has written into an operand: the gradient would be wrong.
        """
        taken = [left for left in self._left if left.slice >= first_slice]
        self._left = [left for left in self._left if left.slice < first_slice]
        if any(_versions(left.operands) != left.versions for left in taken):
            raise RuntimeError(_CHANGED)
        operands = [left.operands for left in taken]
        taken.clear()
        return self._rule(self.parameters, operands)


class _Products(torch.autograd.Function):
    """Node of a layer: nothing forward, the gradients of its parameters backward."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, first_slice: int, then: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.kept, ctx.first_slice = kept, first_slice
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.kept.take(ctx.first_slice)


def _versions(tensors: Operands) -> tuple[int, ...]:
    return tuple([tensor._version for tensor in tensors])  # twice as fast as of a generator


def _joined(pairs: list[Operands], shares: TokenShares | None) -> Iterator[Operands]:
    """Yield the operands for each product, short ones joined, shares gathered. Empties the list meanwhile."""
    first = pairs[0][1]
    one_by_one = first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64)
    # all may have no token, as an expert's
    least = _LEAST_TOKENS if one_by_one else max(sum(gradients.shape[0] for _, gradients in pairs), 1)
    del first
    while pairs:
        inputs, gradients, rows = [], [], 0
        while pairs and rows < least:
            pair = pairs.pop(0)
            inputs.append(pair[0] if shares is None else shares.gather(pair[0]))
            gradients.append(pair[1])
            rows += pair[1].shape[0]
        del pair
        yield _cat(inputs), _cat(gradients)


def _cat(tensors: list[Tensor]) -> Tensor:
    """Join the tensors and free them: the inputs are not held twice while the gradients are joined."""
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    tensors.clear()
    return joined
