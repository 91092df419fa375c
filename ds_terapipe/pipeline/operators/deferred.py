"""Linear layers and embeddings whose weight gradients are deferred to the end of their micro-batch.

Outside a slice's forward in training, and for weights that are not plain trained parameters, they equal
``torch.nn.functional``'s.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from ds_terapipe.pipeline.operators.autograd import apply, once_differentiable
from ds_terapipe.pipeline.operators.compiled import suits
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.weight_gradients import OfEmbedding, OfLinear, Rule, WeightGradients
from ds_terapipe.pipeline.token_shares import TokenShares

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def deferred_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply ``torch.nn.functional.linear`` to input [..., in], weight [out, in], bias [out], in function layers.

    :class:`torch.nn.Linear` modules need no such call.
    """
    keeper = keeper_of_linear(input, weight, bias)
    if keeper is None:
        return F.linear(input, weight, bias)
    if keeper.compiled is not None and suits(input, weight):
        made: Tensor = keeper.compiled.linear(input, weight, bias, keeper.operands)
        return made
    return _linear(input, weight, bias, keeper, None)


def gathered_linear(input: Tensor, weight: Tensor, bias: Tensor | None, shares: TokenShares) -> Tensor:
    """Apply :func:`deferred_linear` to a rank's share of the tokens, [share, ...], and return all tokens'; collective.

    Only for weights that wait, see :func:`waits_as_linear`. Kept is the share: its tokens are gathered again for the
    weight's gradient.
    """
    keeper = keeper_of_linear(input, weight, bias)
    if keeper is None:
        return F.linear(shares.gather(input), weight, bias)
    return _linear(input, weight, bias, keeper, shares)


def _linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, keeper: WeightGradients, shares: TokenShares | None
) -> Tensor:
    parameters = (weight,) if bias is None or not bias.requires_grad else (weight, bias)
    anchor = None if input.requires_grad else _anchor(weight)
    made: Tensor = apply(_Linear, input, anchor, (weight, bias), parameters, keeper, shares)
    return made


def deferred_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Apply ``torch.nn.functional.embedding`` to input [...] and weight [rows, features], in layers that are
    functions."""
    keeper = keeper_of(weight)
    if keeper is None or sparse or max_norm is not None:
        return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    row = -1 if padding_idx is None else padding_idx % weight.shape[0]
    made: Tensor = apply(_Embedding, input, _anchor(weight), (weight,), OfEmbedding(row, scale_grad_by_freq), keeper)
    return made


def keeper_of(weight: Tensor) -> WeightGradients | None:
    """Return the keeper of a weight's deferred gradients; None if they are not deferred."""
    return _keeper(weight) if torch.is_grad_enabled() else None


def keeper_of_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> WeightGradients | None:
    """Return :func:`keeper_of` a linear layer's weight; None if it is not deferred here."""
    keeper = keeper_of(weight)
    return keeper if keeper is not None and _differentiates(input, bias) else None


def waits_as_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the gradients of a linear layer's weight are deferred in this slice, if it runs with a graph.

    A checkpoint's first run has no graph, and both runs must round alike. Under autocast autograd makes the gradient of
    the weight's copy; the same holds for a bias computed from something else.
    """
    return _keeper(weight) is not None and _differentiates(input, bias)


def _keeper(weight: Tensor) -> WeightGradients | None:
    context = SliceContext.current
    keeper = None if context is None else context.keeper  # first: None where nothing is deferred
    if keeper is None or torch._C._are_functorch_transforms_active():  # which autograd functions do not know
        return None
    plain = weight.is_leaf and weight.requires_grad and weight.dim() == 2 and not weight.is_complex()
    return keeper if plain and not has_operators(type(weight)) else None


@functools.cache
def has_operators(kind: type[Tensor]) -> bool:
    """Whether a class of tensors sees calls of PyTorch's Python API: its linear layers may be others."""
    own, of_all = (getattr(each.__torch_function__, "__func__", None) for each in (kind, Tensor))
    return kind.__torch_function__ is not Parameter.__torch_function__ and own is not of_all


def _differentiates(input: Tensor, bias: Tensor | None) -> bool:
    if bias is not None and not bias.is_leaf:
        return False
    return not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(input.device.type)


class EmbeddingCalls(TorchFunctionMode):
    """Mode that replaces ``torch.nn.functional.embedding`` by :func:`deferred_embedding` in modules."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (deferred_embedding if func is F.embedding else func)(*args, **(kwargs or {}))


def _anchor(weight: Tensor) -> Tensor:
    """Return an empty tensor that requires a gradient but never gets one: it makes autograd call backward."""
    return weight.new_empty(0).requires_grad_()


def _keep(
    rule: Rule, keeper: WeightGradients, parameters: tuple[Tensor, ...], inputs: Tensor, gradient: Tensor
) -> None:
    """Keep inputs [tokens, ...] and the gradient of the outputs [tokens, features] of a slice."""
    if gradient.shape[0] == 1:
        # One row is also the whole gradient of a bias that is added to the output: it may become that bias's
        # ``grad``, into which the other slices are added.
        gradient = gradient.clone()
    keeper.keep(rule, parameters, (inputs, gradient))


def _no_view(made: Tensor) -> Tensor:
    """Return a result that models may write into; autograd refuses writes to a view made inside such a function."""
    return _UNSAFE_VIEW(made, made.shape) if made._is_view() else made


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward returns only the gradient of the input.

    The parameters come in tuples, hidden from autograd: even an edge without a gradient would run the hooks on their
    gradients (ZeRO's, ``immediate_grad_update``'s) once per slice. The weight is still saved, so that autograd raises
    if it changes before its backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor | None,
        operands: tuple[Tensor, Tensor | None],
        parameters: tuple[Tensor, ...],
        keeper: WeightGradients,
        shares: TokenShares | None,
    ) -> Tensor:
        ctx.save_for_backward(x, operands[0])
        ctx.parameters, ctx.keeper, ctx.shares = parameters, keeper, shares
        return _no_view(F.linear(x if shares is None else shares.gather(x), *operands))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), shares = ctx.saved_tensors, ctx.shares
        rows = gradient.reshape(-1, gradient.shape[-1])
        # Detached: otherwise the kept tensors would hold the slice's graph, messages and buffers until the products.
        _keep(OfLinear(shares), ctx.keeper, ctx.parameters, x.detach().reshape(-1, x.shape[-1]), rows)
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        of_input = torch.mm(rows, weight).view(*gradient.shape[:-1], weight.shape[1])
        return of_input if shares is None else shares.sum(of_input), None, None, None, None, None


class _Embedding(torch.autograd.Function):
    """``F.embedding`` whose backward returns nothing; see :class:`_Linear`."""

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, anchor: Tensor, parameters: tuple[Tensor], rule: OfEmbedding, keeper: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.parameters, ctx.rule, ctx.keeper = parameters, rule, keeper
        return _no_view(F.embedding(indices, *parameters))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (indices,) = ctx.saved_tensors
        _keep(ctx.rule, ctx.keeper, ctx.parameters, indices.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        return (None,) * 5
