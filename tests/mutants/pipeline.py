"""Ways in which a token pipeline can be wrong and still run to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_terapipe.pipeline.operators.buffers import AttentionState
from ds_terapipe.pipeline.slicing import Span, as_tuple, like
from tests.mutants.harness import Check, Hit, Mutant


def _attends_to_itself(original: Any, hit: Hit) -> Any:
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, state: Any, span: Span, first: int, call: Any) -> Any:
        if span.start == 0:
            return original(ctx, q, k, v, mask, state, span, first, call)
        hit()
        state.write(k, v, span)
        alone = Span(0, span.length, span.length)
        return original(ctx, q, k, v, mask, AttentionState(k, v, span.length), alone, 0, call)

    return forward


def _own_share(original: Any, hit: Hit) -> Any:
    def add_gradients(state: AttentionState, dk: Any, dv: Any, span: Span, first: int = 0) -> Any:
        own = tuple(t[:, :, span.start : span.stop].to(state.k.dtype, copy=True) for t in (dk, dv))
        complete = original(state, dk, dv, span)
        if span.stop == state.k.shape[2]:  # no slice is later
            return complete
        hit()
        return own

    return add_gradients


def _ids_of_slice_0(original: Any, hit: Hit) -> Any:
    def cut_inputs(batch: Any, micro_batch: int, span: Span) -> Any:
        tokens, positions = original(batch, micro_batch, span)
        assert int(positions.min()) == span.start
        if span.start == 0:
            return tokens, positions
        hit()
        return tokens, positions - span.start

    return cut_inputs


def _starts_at_0(original: Any, hit: Hit) -> Any:
    def current_span() -> Span | None:
        span = original()
        if span is None or span.start == 0:
            return span
        hit()
        return Span(0, span.length, span.total)

    return current_span


def _with_labels_of(start_of: Callable[[Any, int], int]) -> Callable[[Any, Hit], Any]:
    """Where a loss runs per slice: a slice gets as many labels as it has tokens, from elsewhere in the sequence."""

    def replacement(original: Any, hit: Hit) -> Any:
        def add(loss: Any, outputs: Any, **options: Any) -> None:
            spans, index = loss._spans, len(loss._terms)
            if not loss._per_slice:
                return original(loss, outputs, **options)
            own, start = spans[index], start_of(spans, index)
            if start != own.start:
                hit()
                loss._spans = [*spans[:index], Span(start, start + own.length, own.total), *spans[index + 1 :]]
            original(loss, outputs, **options)
            loss._spans = spans
            return None

        return add

    return replacement


def _neighbour(spans: Any, index: int) -> int:
    """Where the slice before starts, of the first one the slice behind; moved so that the labels do not run out."""
    other = spans[index - 1 if index > 0 else 1]
    return min(other.start, other.total - spans[index].length)


def _means_of_slices(original: Any, hit: Hit) -> Any:
    def add(loss: Any, outputs: Any, **options: Any) -> None:
        if not loss._per_slice:
            return original(loss, outputs, **options)
        span, weight = loss._spans[len(loss._terms)], loss._weight
        cut = [cut.apply(t, span) for t, cut in zip(as_tuple(loss._labels), loss._label_cuts, strict=True)]
        of_slice = loss._loss_fn.token_weight(like(loss._labels, cut))
        if of_slice > 0:  # else it would be no number
            hit()
            loss._weight = of_slice * len(loss._spans)
        original(loss, outputs, **options)
        loss._weight = weight
        return None

    return add


def _first_gradient(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any, Hit], Any]:
    """Of the first weight in the process whose gradient is made once per micro-batch, in every micro-batch."""

    def replacement(original: Any, hit: Hit) -> Any:
        chosen: list[Any] = []

        def take(kept: Any, *first_slice: int) -> list[Any]:
            made = original(kept, *first_slice)
            if made and not chosen:
                chosen.append(made[0][0])
            if not made or made[0][0] is not chosen[0]:
                return made
            hit()
            return change(made)

        return take

    return replacement


def _left_out(made: list[Any]) -> list[Any]:
    # zero, as an optimiser sees it: without a gradient of its own kind the parameter would be looked for in vain
    (weight, gradient), *rest = made
    return [(weight, torch.zeros_like(gradient)), *rest]


def _not_reduced(original: Any, hit: Hit) -> Any:
    def reduce_tied_gradients(engine: Any, *args: Any) -> None:
        if engine.module.tied_comms:
            hit()
            return
        original(engine, *args)

    return reduce_tied_gradients


def _of_the_last_unit(original: Any, hit: Hit) -> Any:
    """The gradients of the unit before with the same shapes are sent."""
    sent: dict[Any, Any] = {}

    def send_backward(links: Any, stage: int, unit: Any, gradients: Any) -> None:
        shapes = tuple(tuple(t.shape) for t in gradients)
        wrong, sent[shapes] = sent.get(shapes), gradients
        if wrong is not None:
            hit()
        original(links, stage, unit, gradients if wrong is None else wrong)

    return send_backward


_TIED, _ADAM = "engine, PP2, tied", "engine, PP2, AdamW"
_ROTARY = "parity, PP2, rotary"
_LOSS = "ds_terapipe.pipeline.loss:MicroBatchLoss.add"
_TAKE = "ds_terapipe.pipeline.operators.weight_gradients:_Kept.take"

MUTANTS = (
    Mutant(
        "attention ignores earlier slices",
        "A slice attends to its own tokens only.",
        ("ds_terapipe.pipeline.operators.attention:SliceAttention.forward",),
        _attends_to_itself,
        _TIED,
    ),
    Mutant(
        "dK and dV of later slices dropped",
        "A slice's keys and values get the gradient of its own queries only.",
        ("ds_terapipe.pipeline.operators.buffers:AttentionState.add_gradients",),
        _own_share,
        _TIED,
    ),
    Mutant(
        "learned positions of slice 0",
        "Every slice gets position ids that start at 0.",
        ("ds_terapipe.pipeline.batch:StepBatch.cut_inputs",),
        _ids_of_slice_0,
        _TIED,
    ),
    Mutant(
        "rotary positions of slice 0",
        "Every slice takes itself for the first.",
        ("ds_terapipe.megatron.layers:current_span",),
        _starts_at_0,
        _ROTARY,
    ),
    Mutant(
        "labels of the neighbouring slice",
        "A slice's loss is against other labels.",
        (_LOSS,),
        _with_labels_of(_neighbour),
        _TIED,
    ),
    Mutant("a denominator per slice", "The loss is the mean of its slices' means.", (_LOSS,), _means_of_slices, _TIED),
    Mutant("a weight gradient left out", "One weight's gradient is zero.", (_TAKE,), _first_gradient(_left_out), _TIED),
    Mutant(
        "a weight gradient counted twice",
        "One weight's gradient is twice what it is.",
        (_TAKE,),
        _first_gradient(lambda made: [made[0], *made]),
        _TIED,
    ),
    Mutant(
        "a tied gradient not reduced",
        "Each holder of a tied weight steps by its own part of the gradient.",
        ("ds_terapipe.pipeline.engine:TokenPipelineEngine._exec_reduce_tied_grads",),
        _not_reduced,
        _TIED,
    ),
    Mutant(
        "a gradient sent for the wrong unit",
        "The stage before gets the gradient of an earlier unit that has the same shape.",
        ("ds_terapipe.pipeline.transport.p2p:Links.send_backward",),
        _of_the_last_unit,
        _TIED,
    ),
)

_NO_ROTARY = {"rotary positions of slice 0": "the model has learned positions"}
_NO_LEARNED = {"learned positions of slice 0": "the model has rotary positions"}
_UNTIED = {"a tied gradient not reduced": "the model has no tied weights"}
_WHOLE_LOSS = dict.fromkeys(
    ("labels of the neighbouring slice", "a denominator per slice"), "its loss runs on the whole micro-batch"
)


def _check(name: str, measure: str, args: tuple[Any, ...], *blind: dict[str, str]) -> Check:
    why = {mutant: reason for each in blind for mutant, reason in each.items()}
    return Check(name, measure, args, tuple(m.name for m in MUTANTS if m.name not in why), why)


_ENGINE, _PARITY = "tests.pipeline.test_engine_parity:off_by", "tests.test_parity:off_by"

CHECKS = (
    _check(_TIED, _ENGINE, ("1f1b-uneven-M2-per token-tied-sgd-PP2xDP1-float64",), _NO_ROTARY),
    _check(_ADAM, _ENGINE, ("1f1b-2-M1-per token-untied-adamw-PP2xDP1-float32",), _NO_ROTARY, _UNTIED),
    _check(
        "engine, PP2, TeraPipe's schedule",
        _ENGINE,
        ("terapipe-uneven-M1-masked-tied-adamw-PP2xDP1-float64",),
        _NO_ROTARY,
        _WHOLE_LOSS,
    ),
    _check("engine, PP4", _ENGINE, ("1f1b-5-M2-per token-tied-adamw-PP4xDP1-float64",), _NO_ROTARY),
    _check("engine, PP2xDP2", _ENGINE, ("1f1b-5-M2-masked-tied-adamw-PP2xDP2-float64",), _NO_ROTARY, _WHOLE_LOSS),
    _check(
        "parity, PP2xTP2, rotary, grouped queries",
        _PARITY,
        ("PP2xTP2", "rope", "grouped", "float32"),
        _NO_LEARNED,
        _UNTIED,
    ),
    _check(
        "parity, PP2xTP2, learned, grouped queries", _PARITY, ("PP2xTP2", "learned", "grouped", "float64"), _NO_ROTARY
    ),
    _check("parity, PP2xTP2, learned", _PARITY, ("PP2xTP2", "learned", "alone", "float32"), _NO_ROTARY),
    _check(_ROTARY, _PARITY, ("PP2", "rope", "alone", "float64"), _NO_LEARNED, _UNTIED),
    _check("parity, PP4, learned", _PARITY, ("PP4", "learned", "alone", "float64"), _NO_ROTARY),
    _check(
        "parity, PP2xDP2, rotary, grouped queries",
        _PARITY,
        ("PP2xDP2", "rope", "grouped", "float64"),
        _NO_LEARNED,
        _UNTIED,
    ),
)
