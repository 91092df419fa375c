"""Comparison of the gradients of a layer's inputs, whole and sliced, for a layer whose outputs are the same.

A layer may mix tokens in its backward pass alone: by a hook or an autograd function that divides by the norm of a
gradient, or one that adds the gradient of an auxiliary loss over all tokens. Outputs get random gradients in the first
half of the sequence and none in the second. A causal layer has none there either, so what is added shows at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.slicing import Span, TensorCut, aliases, as_tuple, like, part_of
from ds_terapipe.schedule import Unit

Difference = Callable[[Tensor, Tensor, "int | None"], float]
_NOISE = 1e-12  # of the gradients in the first half


@contextmanager
def frozen(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which no parameter gets a gradient, so that no hook on one runs."""
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class InputGradients:
    """Gradients of a layer's inputs, in slices or whole.

    Args:
        run: runs the layer on the inputs of a slice.
        context: the engine's slice context.
        cuts, after: of the layer's inputs and outputs.
    """

    def __init__(
        self,
        run: Callable[[Any, Span], Any],
        context: SliceContext,
        cuts: Sequence[TensorCut],
        after: Sequence[TensorCut],
    ) -> None:
        self._run, self._context, self._cuts, self._after = run, context, cuts, after

    def difference(self, inputs: Any, spans: Sequence[Span], difference: Difference) -> float:
        """Return the largest one between slices and the whole sequence; 0 for a layer without gradients."""
        total, errors = spans[-1].stop, [0.0]
        try:
            (whole,) = self._of(inputs, [Span(0, total, total)])
        except Exception:  # no memory for it, or it fails in training as well
            return 0.0
        for of_all, of_slices, cut in zip(whole, zip(*self._of(inputs, spans), strict=True), self._cuts, strict=True):
            if of_all is None:
                continue
            if cut.row is None:
                errors.append(difference(of_all, torch.stack(of_slices).sum(0), None))
            else:
                a = torch.cat([cut.apply(of_all, span) for span in spans], cut.row)
                errors += self._by_halves(a, torch.cat(of_slices, cut.row), cut, spans, difference)
        return max(errors)

    @staticmethod
    def _by_halves(a: Tensor, b: Tensor, cut: TensorCut, spans: Sequence[Span], difference: Difference) -> list[float]:
        """Return the differences of gradients ``a`` and ``b`` in the first and the second half of the sequence."""
        assert cut.row is not None
        total = spans[-1].stop
        places = torch.arange(total, device=a.device)
        late = torch.cat([_own(places, cut._replace(row=0), span) for span in spans]) >= total // 2
        a, b = a.movedim(cut.row, 0), b.movedim(cut.row, 0)
        adds = late.any() and b[late].abs().max() > _NOISE * a[~late].abs().mean()
        return [difference(a[half], b[half], 0) for half in (~late, *([late] if adds else []))]

    def _of(self, inputs: Any, spans: Sequence[Span]) -> list[list[Tensor | None]]:
        """Return the gradients of each slice's inputs, None for those that have none."""
        leaves, outputs, total = [], [], spans[-1].stop
        with torch.enable_grad():
            for span in spans:
                part = as_tuple(part_of(inputs, self._cuts, span))
                for tensor, cut in zip(part, self._cuts, strict=True):
                    tensor.requires_grad_(tensor.is_floating_point() and cut.column is None)
                leaves.append(part)
                outputs.append(as_tuple(self._run(aliases(like(inputs, part)), span)))
        made = [_random(output, cut, total) for output, cut in zip(outputs[0], self._after, strict=True)]
        for index in reversed(range(len(spans))):
            # an output that does not follow the tokens is the first slice's alone, as for a loss
            several = zip(outputs.pop(), made, self._after, strict=True)
            pairs = [
                (o, _own(g, cut, spans[index]))
                for o, g, cut in several
                if o.requires_grad and (cut.row is not None or not index)
            ]
            if pairs:
                roots, gradients = zip(*pairs, strict=True)
                with self._context.backward(Unit(0, index), spans[index]):
                    torch.autograd.backward(roots, gradients)
        return [[_gradient(tensor) for tensor in part] for part in leaves]


def _gradient(leaf: Tensor) -> Tensor | None:
    if not leaf.requires_grad:
        return None
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _random(output: Tensor, cut: TensorCut, total: int) -> Tensor:
    """Return random numbers of an output's shape for ``total`` tokens, and zeros in the second half of them."""
    shape = [total if dimension == cut.row else size for dimension, size in enumerate(output.shape)]
    made = torch.randn(shape, generator=torch.Generator().manual_seed(total), dtype=torch.float32)
    if cut.row is not None:
        made.narrow(cut.row, total // 2, total - total // 2).zero_()
    return made.to(output)


def _own(gradient: Tensor, cut: TensorCut, span: Span) -> Tensor:
    """Return the part of a gradient of all tokens that belongs to a slice."""
    return TensorCut(cut.row).apply(gradient, span)
