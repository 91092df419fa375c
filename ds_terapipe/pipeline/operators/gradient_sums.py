"""Gradients of 16-bit parameters, summed over the slices of a micro-batch in fp32.

Autograd adds a slice's gradient to the last one's in the parameter's own type, and each addition rounds. Here the sum is kept
in fp32 and rounded when a micro-batch ends, as the unsliced backward's is. A gradient is in one place at a time, in ``grad`` or
in the sums, so the slices of several micro-batches may come in any order: what is given back at the end of one may hold a part
of another's, and that part is not given again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class GradientSums:
    """The sums of the slices that came since a micro-batch ended last.

    Args:
        parameters: of the stage; those of 16 bits take part.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._parameters = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
        self._sums: dict[Parameter, Tensor] = {}

    def put_aside(self) -> None:
        """Move what a slice left in ``grad`` into the sums."""
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            known = self._sums.get(parameter)
            self._sums[parameter] = parameter.grad.float() if known is None else known.add_(parameter.grad)
            parameter.grad = None

    def give_back(self) -> None:
        """Put the sums into ``grad``, rounded to the parameter's type."""
        self.put_aside()
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()

    def clear(self) -> None:
        """Forget everything (a step that ended in an error leaves some)."""
        self._sums.clear()
