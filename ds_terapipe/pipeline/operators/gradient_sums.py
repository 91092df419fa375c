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


class GradientSums:
    """Sums of the slices since the last end of a micro-batch.

    Args:
        parameters: parameters of the stage; only those of 16 bits are summed.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
        self._sums: dict[Parameter, Tensor] = {}

    def put_aside(self) -> None:
        """Move a slice's gradients from ``grad`` into the sums."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            known = self._sums.get(parameter)
            self._sums[parameter] = parameter.grad.float() if known is None else known.add_(parameter.grad)
            parameter.grad = None

    def give_back(self) -> None:
        """Move the sums to ``grad``, rounded to the parameter's type."""
        self.put_aside()
        while self._sums:  # one by one: no sum beside its rounded copy, but for one
            parameter, total = self._sums.popitem()
            parameter.grad = total.to(parameter.dtype)

    def bytes_of(self, parameters: Iterable[Parameter]) -> int:
        """Return the bytes of the sums of these parameters."""
        return sum(self._sums[parameter].nbytes for parameter in set(parameters) if parameter in self._sums)

    def clear(self) -> None:
        """Drop all sums, e.g. those that a failed step has left."""
        self._sums.clear()
