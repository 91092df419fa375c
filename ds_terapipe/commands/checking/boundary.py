"""Messages of a stage that is alone: tensors of the boundary's form come in, what goes out is let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_terapipe.pipeline.slicing import WHOLE, Span, TensorCut, as_tuple, like
from ds_terapipe.pipeline.transport.boundary import BoundarySpec
from ds_terapipe.schedule import Unit


class Boundary(NamedTuple):
    """Tensors between two stages: their types and shapes for a whole sequence, and how each follows the tokens."""

    spec: BoundarySpec
    cuts: tuple[TensorCut, ...]

    @classmethod
    def of(cls, outputs: Any, cuts: Sequence[TensorCut] | None = None) -> Boundary:
        """Return the boundary of a stage's outputs for a whole sequence; None: they do not follow the tokens."""
        found = cuts or [WHOLE] * len(as_tuple(outputs))
        # another process reads it, without a process group
        return cls(
            BoundarySpec.of(outputs),
            tuple(c._replace(shares=c.shares and c.shares._replace(group=None)) for c in found),
        )

    def tensors(self, span: Span) -> Any:
        """Return what the stage before sends for a slice."""
        specs = self.spec.at(self.cuts, span).tensors
        made = [torch.empty(spec.shape, dtype=spec.dtype).requires_grad_(spec.needs_grad) for spec in specs]
        return made[0] if self.spec.single else tuple(made)


class Alongside:
    """`Links` of a stage without neighbours.

    Args:
        before: the boundary to the stage before; None: this is the first one.
        span: the tokens of a unit.
        mode: context in which tensors are made.
    """

    def __init__(self, before: Boundary | None, span: Callable[[Unit], Span], mode: Any) -> None:
        self._before, self._span, self._mode = before, span, mode
        self._sent: dict[Unit, Any] = {}
        self.whole: Any = None  # the last outputs that were sent

    def begin(self, *row: Any) -> None:
        """Implement :meth:`Links.begin`."""
        self._sent.clear()

    def finish(self) -> None:
        """Implement :meth:`Links.finish`."""

    def receive_forward(self, stage: int, unit: Unit) -> Any:
        """Implement :meth:`Links.receive_forward`."""
        assert self._before is not None
        with self._mode:
            return self._before.tensors(self._span(unit))

    def send_forward(self, stage: int, unit: Unit, outputs: Any) -> None:
        """Implement :meth:`Links.send_forward`."""
        self._sent[unit] = like(
            outputs, [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in as_tuple(outputs)]
        )
        self.whole = self._sent[unit]

    def receive_backward(self, stage: int, unit: Unit) -> list[Tensor]:
        """Implement :meth:`Links.receive_backward`."""
        sent = as_tuple(self._sent.pop(unit))
        return [torch.zeros_like(tensor) for tensor in sent if tensor.requires_grad]

    def send_backward(self, stage: int, unit: Unit, gradients: Sequence[Tensor]) -> None:
        """Implement :meth:`Links.send_backward`."""
