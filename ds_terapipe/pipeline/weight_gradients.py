"""Weight gradients of linear layers, made once per micro-batch instead of once per slice.

A slice's weight gradient is a small matrix product whose result is as large as the weight and has to be added to it: for
short slices that traffic is most of what cutting costs. Here a slice's backward makes the gradient of the input alone and
keeps (input, output gradient), the tensors themselves; when the micro-batch is through, a layer's products are made one after
the other, and its weight gradient stays in the cache meanwhile. In 16 bits, where each addition would round, and on GPUs,
which want large products, it is one product over all tokens. The price is memory: inputs and output gradients of a
micro-batch's linear layers live until then. (Deferred weight gradients as in zero-bubble schedules and MEPipe; the gain is
TeraPipe's floor per slice.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_terapipe.pipeline.packed_weights import PackedWeights

# Below, a product takes longer than joining its operands with the next ones.
_LEAST_TOKENS = 128


class WeightGradients:
    """What is kept for the weight gradients of the micro-batches that are on their way back."""

    def __init__(self) -> None:
        self._layers: dict[int, dict[tuple[int, int], _Kept]] = defaultdict(dict)
        self._micro_batch: int | None = None

    @contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """Around a backward pass of a slice of ``micro_batch``: what layers leave in it belongs to that micro-batch."""
        self._micro_batch = micro_batch
        try:
            yield
        finally:
            self._micro_batch = None

    def keep(self, weight: Tensor, bias: Tensor | None, inputs: Tensor, gradient: Tensor) -> None:
        """Keep a slice's inputs [tokens, in] and the gradient of its outputs [tokens, out].

        Raises RuntimeError outside of the pipeline's own backward passes: there nobody will ask for what is kept.
        """
        if self._micro_batch is None:
            raise RuntimeError(
                'token_pipeline.weight_gradients: got "micro_batch" and a model that differentiates its own linear layers '
                '(torch.autograd.grad in its forward?), must leave that to the pipeline, use "slice"'
            )
        layers, key = self._layers[self._micro_batch], (id(weight), id(bias))
        kept = layers.get(key)  # a tied weight may be used with a bias in one place and without in another
        if kept is None:
            kept = layers[key] = _Kept(weight, bias)
        kept.add(inputs, gradient)

    def make(self, micro_batch: int) -> None:
        """Make the gradients of a micro-batch and accumulate them as a backward pass would, hooks included."""
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for kept in self._layers.pop(micro_batch, {}).values():
            for parameter, gradient in kept.take():
                with torch.enable_grad():
                    roots.append(parameter.view_as(parameter))
                gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)

    @property
    def kept_bytes(self) -> int:
        """What is kept for all micro-batches that are on their way back; layers with the same inputs keep them once."""
        layers = (layer for of_one in self._layers.values() for layer in of_one.values())
        kept = (t.untyped_storage() for layer in layers for t in layer.tensors())
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def clear(self) -> None:
        """Forget everything (a step that ended in an error leaves some)."""
        self._layers.clear()


class _Pair(NamedTuple):
    """Of one slice: inputs [tokens, in] and the gradient of the outputs [tokens, out], with their versions."""

    inputs: Tensor
    gradient: Tensor
    versions: tuple[int, int]


class _Kept:
    """What the slices of a micro-batch leave in one linear layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._pairs: list[_Pair] = []

    def tensors(self) -> Iterator[Tensor]:
        for inputs, gradient, _ in self._pairs:
            yield from (inputs, gradient)

    def add(self, inputs: Tensor, gradient: Tensor) -> None:
        self._pairs.append(_Pair(inputs, gradient, (inputs._version, gradient._version)))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and their gradients; nothing when no slice came by. Lets the slices' tensors go."""
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return []
        products = _joined(pairs)
        inputs, gradient = next(products)
        of_weight = gradient.t() @ inputs
        of_bias = None if self._bias is None else gradient.sum(0)
        for inputs, gradient in products:
            of_weight.addmm_(gradient.t(), inputs)
            if of_bias is not None:
                of_bias += gradient.sum(0)
        made = [(self._weight, of_weight)]
        return made if self._bias is None or of_bias is None else [*made, (self._bias, of_bias)]


def _joined(pairs: list[_Pair]) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs, short ones joined, into as many as there are products to make. Empties the list as it goes.

    Raises RuntimeError where an operation of PyTorch's has written into one of the tensors: that would be a wrong gradient.
    """
    if any((pair.inputs._version, pair.gradient._version) != pair.versions for pair in pairs):
        raise RuntimeError(
            "token_pipeline.weight_gradients: got an input or output gradient of a linear layer that was modified in place "
            'during the backward pass, must be left alone until the micro-batch is through, use "slice"'
        )
    first = pairs[0].inputs
    one_by_one = first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64)
    least = _LEAST_TOKENS if one_by_one else sum(pair.inputs.shape[0] for pair in pairs)
    del first
    while pairs:
        group, rows = [], 0
        while pairs and rows < least:
            group.append(pairs.pop(0))
            rows += group[-1].inputs.shape[0]
        several = [pair.inputs for pair in group], [pair.gradient for pair in group]
        group.clear()
        yield _cat(several[0]), _cat(several[1])


def _cat(tensors: list[Tensor]) -> Tensor:
    """Joins the tensors and lets them go: there are not two copies of the inputs while the gradients are joined."""
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    tensors.clear()
    return joined


class DeferredLinear(torch.autograd.Function):
    """``F.linear`` whose backward returns the gradient of the input only.

    The parameters come in a tuple, out of autograd's sight: an edge to them, even one that carries nothing, would run the
    hooks on their gradients (ZeRO's, ``immediate_grad_update``'s) once per slice. The weight is saved nevertheless, so that
    one which is changed before its backward is autograd's own error.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameters: tuple[Tensor, Tensor | None], keeper: WeightGradients, packed: PackedWeights
    ) -> Tensor:
        ctx.save_for_backward(x, parameters[0])
        ctx.parameters, ctx.keeper, ctx.packed = parameters, keeper, packed
        out = packed.linear(x, *parameters)
        return torch.nn.functional.linear(x, *parameters) if out is None else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        weight, bias = ctx.parameters
        # Detached: what is kept would otherwise hold the slice's graph, and with it messages and buffers, until the products.
        inputs, outputs = x.detach().reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        if outputs.shape[0] == 1:
            # One row is also the whole gradient of a bias that somebody adds to the output: it may become that bias's
            # ``grad``, into which the other slices are added.
            outputs = outputs.clone()
        ctx.keeper.keep(weight, bias, inputs, outputs)
        of_input = ctx.packed.input_gradient(gradient, weight)
        return gradient @ weight if of_input is None else of_input, None, None, None
