"""Messages of a stage that is alone: tensors of the boundary's form come in, what goes out is let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_terapipe.pipeline.slicing import WHOLE, Span, TensorCut, as_tuple, like
from ds_terapipe.schedule import Unit


@dataclass(frozen=True)
class Form:
    """One tensor that crosses a boundary: its shape for a whole sequence, type, and how it follows the tokens."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    cut: TensorCut = WHOLE

    def tensor(self, span: Span) -> Tensor:
        """Return a tensor of this form for a slice."""
        sizes = {self.cut.row: self.cut.rows(span), self.cut.column: span.stop}
        shape = [sizes.get(dimension, size) for dimension, size in enumerate(self.shape)]
        return torch.empty(shape, dtype=self.dtype).requires_grad_(self.requires_grad)


def _for_others(cut: TensorCut) -> TensorCut:
    """Return the cut as another process can read it: without a process group."""
    return cut if cut.shares is None else cut._replace(shares=cut.shares._replace(group=None))


@dataclass(frozen=True)
class Boundary:
    """Tensors between two stages; ``single``: one tensor, not a tuple."""

    forms: tuple[Form, ...]
    single: bool

    @classmethod
    def of(cls, outputs: Any, cuts: Sequence[TensorCut] | None = None) -> Boundary:
        """Return the boundary of a stage's outputs for a whole sequence; None: they do not follow the tokens."""
        tensors = as_tuple(outputs)
        cuts = [_for_others(cut) for cut in cuts or [WHOLE] * len(tensors)]
        forms = (Form(tuple(t.shape), t.dtype, t.requires_grad, cut) for t, cut in zip(tensors, cuts, strict=True))
        return cls(tuple(forms), isinstance(outputs, Tensor))

    def tensors(self, span: Span) -> Any:
        """Return what the stage before sends for a slice."""
        made = [form.tensor(span) for form in self.forms]
        return made[0] if self.single else tuple(made)


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
