"""Gradients of 16-bit parameters, summed over the slices of a micro-batch in fp32.

Autograd adds gradients of slices in the parameter's own type, and each addition rounds. Here the sum is kept in fp32
and rounded at the end of a micro-batch, as the unsliced backward's is. A gradient is either in ``grad`` or in the sums,
so slices of several micro-batches may be mixed. The sums returned at the end of one may hold a part of another, which
is not returned again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

_NARROW = (torch.bfloat16, torch.float16)


def summed(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters of 16 bits, whose gradients are summed here."""
    return [parameter for parameter in parameters if parameter.dtype in _NARROW]


class GradientSums:
    """Sums of the slices since the last end of a micro-batch; only parameters of 16 bits have them."""

    def __init__(self) -> None:
        self._sums: dict[Parameter, Tensor] = {}

    def put_aside(self, parameters: Iterable[Parameter]) -> None:
        """Move a slice's gradients of `summed` parameters from ``grad`` into the sums."""
        sums, gradients = [], []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            parameter.grad, known = None, self._sums.get(parameter)
            if known is None:
                self._sums[parameter] = gradient.float()
            else:
                sums.append(known)
                gradients.append(gradient)
        if sums:  # one call: on small parameters each takes longer than its kernel
            torch._foreach_add_(sums, gradients)

    def give_back(self, parameters: Iterable[Parameter]) -> None:
        """Move the sums of `summed` parameters to ``grad``, rounded to the parameter's type; others stay unrounded."""
        parameters = list(parameters)
        self.put_aside(parameters)
        for parameter in parameters:  # one by one: no sum beside its rounded copy, but for one
            total = self._sums.pop(parameter, None)
            if total is not None:
                parameter.grad = total.to(parameter.dtype)

    def bytes_of(self, parameters: Iterable[Parameter]) -> int:
        """Return the bytes of the sums of these parameters."""
        return sum(self._sums[parameter].nbytes for parameter in set(parameters) if parameter in self._sums)

    def clear(self) -> None:
        """Drop all sums, e.g. those that a failed step has left."""
        self._sums.clear()
