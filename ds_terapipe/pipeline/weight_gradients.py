"""Weight gradients of linear layers, made once per micro-batch instead of once per slice.

A slice's weight gradient is a small matrix product whose result is as large as the weight and has to be added to it: for
short slices that traffic is most of what cutting costs. Here a slice's backward makes the gradient of the input alone and
keeps (input, output gradient); when the micro-batch is through, one product over all its tokens makes the weight gradient.
Same sum, rounded as in the unsliced run. The price is memory: inputs and output gradients of a micro-batch's linear layers
live until then. (Deferred weight gradients as in zero-bubble schedules and MEPipe; the gain is TeraPipe's floor per slice.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_terapipe.pipeline.spans import Span


class WeightGradients:
    """What is kept for the weight gradients of the micro-batch that is on its way back."""

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], _Kept] = {}

    def keep(self, weight: Tensor, bias: Tensor | None, inputs: Tensor, gradient: Tensor, span: Span) -> None:
        """Keep a slice's inputs [tokens, in] and the gradient of its outputs [tokens, out]."""
        key = id(weight), id(bias)  # a tied weight may be used with a bias in one place and without in another
        kept = self._layers.get(key)
        if kept is None:
            kept = self._layers[key] = _Kept(weight, bias)
        kept.add(inputs, gradient, inputs.shape[0] // span.length * span.total)

    def make(self) -> None:
        """Make the gradients of the micro-batch and accumulate them as a backward pass would, hooks included."""
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for kept in self._layers.values():
            for parameter, gradient in kept.take():
                with torch.enable_grad():
                    roots.append(parameter.view_as(parameter))
                gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)

    @property
    def kept_bytes(self) -> int:
        """What is kept for the micro-batch that is on its way back."""
        return sum(kept.kept_bytes for kept in self._layers.values())

    def clear(self) -> None:
        """Forget everything (a step that ended in an error leaves some)."""
        self._layers.clear()


class _Kept:
    """Pairs of one linear layer, one below the other in two buffers as long as the micro-batch has tokens."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._inputs: Tensor | None = None
        self._outputs: Tensor | None = None
        self._rows = 0
        self._made: tuple[Tensor, Tensor] | None = None

    @property
    def kept_bytes(self) -> int:
        if self._inputs is None or self._outputs is None:
            return 0
        return self._rows * (self._inputs.shape[1] + self._outputs.shape[1]) * self._inputs.element_size()

    def add(self, inputs: Tensor, gradient: Tensor, capacity: int) -> None:
        rows = inputs.shape[0]
        if self._inputs is not None and self._rows + rows > self._inputs.shape[0]:
            self._multiply()  # a weight that is used more than once per slice, or longer sequences
        if self._inputs is None or self._outputs is None or self._inputs.shape[0] < rows:
            self._inputs, self._outputs = (t.new_empty((max(capacity, rows), t.shape[1])) for t in (inputs, gradient))
        self._inputs[self._rows : self._rows + rows] = inputs
        self._outputs[self._rows : self._rows + rows] = gradient
        self._rows += rows

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and their gradients; nothing when no slice came by."""
        self._multiply()
        if self._made is None:
            return []
        (weight, bias), self._made = self._made, None
        if (
            self._weight.device.type != "cpu"
        ):  # fresh memory is dear on CPU (page faults) and cheap from torch's CUDA pool
            self._inputs = self._outputs = None
        made = [(self._weight, weight)]
        return made if self._bias is None else [*made, (self._bias, bias)]

    def _multiply(self) -> None:
        if self._rows == 0 or self._inputs is None or self._outputs is None:
            return
        inputs, outputs = self._inputs[: self._rows], self._outputs[: self._rows]
        weight, bias = outputs.t() @ inputs, outputs.sum(0)
        self._made = (weight, bias) if self._made is None else (self._made[0] + weight, self._made[1] + bias)
        self._rows = 0


class DeferredLinear(torch.autograd.Function):
    """``F.linear`` whose backward returns the gradient of the input only.

    The parameters come in a tuple, out of autograd's sight: an edge to them, even one that carries nothing, would run the
    hooks on their gradients (ZeRO's, ``immediate_grad_update``'s) once per slice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, parameters: tuple[Tensor, Tensor | None], keeper: WeightGradients, span: Span
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameters, ctx.keeper, ctx.span = parameters, keeper, span
        return torch.nn.functional.linear(x, *parameters)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias = ctx.parameters
        inputs, outputs = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        ctx.keeper.keep(weight, bias, inputs, outputs, ctx.span)
        return gradient @ weight, None, None, None
