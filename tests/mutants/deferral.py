"""Ways in which weight gradients that wait can be wrong, and modules be left changed."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutants.harness import Check, Hit, Mutant


def _zero(original: Any, hit: Hit) -> Any:
    def call(rule: Any, parameters: Any, operands: Any) -> Any:
        hit()
        return [torch.zeros_like(gradient) for gradient in original(rule, parameters, operands)]

    return call


def _twice(original: Any, hit: Hit) -> Any:
    def take(kept: Any, first_slice: int) -> Any:
        left = list(kept._left)
        made = original(kept, first_slice)
        if not made or type(kept._rule).__name__ != "OfEmbedding":
            return made
        hit()
        kept._left = left
        return [*made, *original(kept, first_slice)]

    return take


def _of_the_last_slice(original: Any, hit: Hit) -> Any:
    def call(rule: Any, parameters: Any, operands: Any) -> Any:
        if len(operands) > 1:
            hit()
        return original(rule, parameters, operands[:1])  # the last slice goes backward first

    return call


def _bound_for_good(original: Any, hit: Hit) -> Any:
    class Bound:
        """A bound method, of the same module in every copy."""

        def __init__(self, function: Any, module: Any) -> None:
            self.__func__, self._module = function, module

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__func__(self._module, *args, **kwargs)

        def __deepcopy__(self, memo: Any) -> Any:
            hit()
            return self

    return Bound


def _one_left(original: Any, hit: Hit) -> Any:
    def undo(changed: Any) -> None:
        module, method, _ = changed[0]
        there = module.__dict__[method]
        original(changed)
        hit()
        module.__dict__[method] = there

    return undo


_OF_EMBEDDING = "ds_terapipe.pipeline.operators.weight_gradients:OfEmbedding.__call__"
_GRADIENT, _COPY, _CLOSE = "an embedding's gradient", "a copy of a changed module", "modules after closing"

MUTANTS = (
    Mutant("an embedding's gradient left out", "It is zero.", (_OF_EMBEDDING,), _zero, _GRADIENT),
    Mutant(
        "an embedding's gradient made twice",
        "What its slices left is counted twice.",
        ("ds_terapipe.pipeline.operators.weight_gradients:_Kept.take",),
        _twice,
        _GRADIENT,
    ),
    Mutant(
        "an embedding's gradient of the last slice",
        "What the other slices left is forgotten.",
        (_OF_EMBEDDING,),
        _of_the_last_slice,
        _GRADIENT,
    ),
    Mutant(
        "a copy bound to the original",
        "A deep copy of a changed module computes with the original's weights.",
        ("ds_terapipe.pipeline.operators.interception:MethodType",),
        _bound_for_good,
        _COPY,
    ),
    Mutant(
        "an attribute left behind",
        "A module keeps what stood in for its method.",
        ("ds_terapipe.pipeline.operators.interception:_undo",),
        _one_left,
        _CLOSE,
    ),
)


def _check(name: str, measure: str, args: tuple[Any, ...], why: str) -> Check:
    catches = tuple(mutant.name for mutant in MUTANTS if mutant.cheapest == name)
    return Check(name, measure, args, catches, {m.name: why for m in MUTANTS if m.name not in catches})


CHECKS = (
    _check(
        _GRADIENT,
        "tests.pipeline.test_weight_gradients:far_off",
        ("embedding",),
        "copies no module, and looks at no attribute",
    ),
    _check(_COPY, "tests.pipeline.test_interception:copies_are_their_own", (), "is about copies"),
    _check(_CLOSE, "tests.pipeline.test_interception:nothing_is_left", (), "looks at attributes alone"),
)
