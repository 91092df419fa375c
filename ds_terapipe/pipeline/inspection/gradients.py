"""Comparison of the gradients that a layer makes, whole and sliced, for a layer whose outputs are the same.

A layer may mix tokens in its backward pass alone: by a hook or an autograd function that divides by the norm of a
gradient, or one that adds the gradient of an auxiliary loss over all tokens. Outputs get random gradients in the first
half of the sequence and none in the second. A causal layer has none there either, so what is added shows at any size.
Gradients of parameters are compared likewise: a penalty of weights, say, would count once for every slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.slicing import Span, TensorCut, aliases, as_tuple, like, part_of
from ds_terapipe.schedule import Unit

Difference = Callable[[Tensor, Tensor, "int | None"], float]
_NOISE = 1e-12  # of the gradients in the first half
_LEAST = 1e-2  # of the layer's largest gradient


@contextmanager
def standing_in(owners: Iterable[nn.Module]) -> Iterator[dict[str, nn.Parameter]]:
    """Context manager in which other parameters, on the same memory, stand in for trained ones, whose hooks do not run.

    Yields them by name. A parameter of another class, or with a buffer for its gradient, gets none, and no gradient.
    """
    owners = list(owners)
    trained = dict.fromkeys(p for owner in owners for p in owner.parameters() if p.requires_grad)
    plain = [p for p in trained if type(p) is nn.Parameter and not hasattr(p, "main_grad")]
    others = {p: nn.Parameter(p.detach()) for p in plain}
    for parameter, other in others.items():
        vars(other).update(vars(parameter))
    named = {p: name for owner in owners for name, p in owner.named_parameters()}
    held = {id(m): m._parameters for owner in owners for m in owner.modules()}
    places = [(of_module, name, p) for of_module in held.values() for name, p in of_module.items() if p in others]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        for of_module, name, parameter in places:
            of_module[name] = others[parameter]
        yield {named[parameter]: other for parameter, other in others.items()}
    finally:
        for of_module, name, parameter in places:
            of_module[name] = parameter
        for parameter in trained:
            parameter.requires_grad_(True)


class LayerGradients:
    """Gradients of a layer's inputs and parameters, in slices or whole.

    Args:
        run: runs the layer on the inputs of a slice.
        context: the engine's slice context.
        cuts, after: of the layer's inputs and outputs.
        parameters: the layer's, by name.
        whole: gives the gradient of a parameter, of all tokens where ranks share them.
        keeper: makes the gradients of weights, if they are made once per micro-batch.
    """

    def __init__(
        self,
        run: Callable[[Any, Span], Any],
        context: SliceContext,
        cuts: Sequence[TensorCut],
        after: Sequence[TensorCut],
        parameters: Mapping[str, nn.Parameter],
        whole: Callable[[nn.Parameter], Tensor | None],
        keeper: WeightGradients | None = None,
    ) -> None:
        self._run, self._context, self._cuts, self._after = run, context, cuts, after
        self._parameters, self._whole, self._keeper = parameters, whole, keeper

    def difference(self, inputs: Any, spans: Sequence[Span], difference: Difference) -> tuple[str, float]:
        """Return the largest one between slices and the whole sequence, and of what; 0 for a layer without gradients."""
        total, errors = spans[-1].stop, [("", 0.0)]
        try:
            (whole,) = self._of(inputs, [Span(0, total, total)])
        except Exception:  # no memory for it, or it fails in training as well
            return errors[0]
        sizes = self._subtract()
        for of_all, of_slices, cut in zip(whole, zip(*self._of(inputs, spans), strict=True), self._cuts, strict=True):
            if of_all is None:
                continue
            if cut.row is None:
                found = [difference(of_all, torch.stack(of_slices).sum(0), None)]
            else:
                a = torch.cat([cut.apply(of_all, span) for span in spans], cut.row)
                found = self._by_halves(a, torch.cat(of_slices, cut.row), cut, spans, difference)
            errors += [("the input", error) for error in found]
        return max([*errors, *self._of_parameters(sizes)], key=itemgetter(1))

    def _subtract(self) -> dict[str, float]:
        """Negate the parameters' gradients, so that those of slices are added to them; return their sizes, of one number."""
        sizes = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad.layout == torch.strided and parameter.numel():
                sizes[name] = _size(self._whole(parameter))
                parameter.grad.neg_()
        return {name: size for name, size in sizes.items() if math.isfinite(size)}

    def _of_parameters(self, sizes: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Yield what is left of each parameter's gradient, relative to its size or that of much larger ones.

        Some gradients are rounding alone: that of a bias of keys is zero.
        """
        floor = max(_LEAST * max(sizes.values(), default=0.0), torch.finfo(torch.float32).tiny)
        for name, size in sizes.items():
            left = _size(self._whole(self._parameters[name]))
            yield f"the parameter {name}", left / max(size, floor) if math.isfinite(left) else math.inf

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        """Context manager around a micro-batch whose weight gradients are made at its end."""
        self._context.weight_gradients = keeper = self._keeper
        try:
            yield
            if keeper is not None:
                keeper.make(0)
        finally:
            self._context.weight_gradients = None
            if keeper is not None:
                keeper.clear()

    @staticmethod
    def _by_halves(a: Tensor, b: Tensor, cut: TensorCut, spans: Sequence[Span], difference: Difference) -> list[float]:
        """Return the differences of gradients ``a`` and ``b`` in the first and the second half of the sequence."""
        assert cut.row is not None
        total = spans[-1].stop
        places = torch.arange(total, device=a.device)
        late = torch.cat([_own(places, cut._replace(row=0), span) for span in spans]) >= total // 2
        a, b = a.movedim(cut.row, 0), b.movedim(cut.row, 0)
        adds = b[late].numel() and b[late].abs().max() > _NOISE * a[~late].abs().mean()
        return [difference(a[half], b[half], 0) for half in (~late, *([late] if adds else []))]

    def _of(self, inputs: Any, spans: Sequence[Span]) -> list[list[Tensor | None]]:
        """Return the gradients of each slice's inputs, None for those that have none."""
        leaves, outputs, total = [], [], spans[-1].stop
        with torch.enable_grad(), self._deferring():
            for span in spans:
                part = as_tuple(part_of(inputs, self._cuts, span))
                for tensor, cut in zip(part, self._cuts, strict=True):
                    tensor.requires_grad_(_has_gradient(tensor) and cut.column is None)
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


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _size(gradient: Tensor | None) -> float:
    assert gradient is not None
    return float(torch.linalg.vector_norm(gradient)) / math.sqrt(gradient.numel())


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
    """Return the part of a gradient of all tokens that belongs to a slice, and of it this rank's share."""
    part = TensorCut(cut.row).apply(gradient, span)
    return part if cut.row is None or cut.shares is None else cut.shares.own(part, cut.row)
