"""What the layer list does not say by itself: a loss with a state, shared weights, what is trained, and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.mutants.harness import Check, Hit, Mutant


def _leaves_the_loss(original: Any, hit: Hit) -> Any:
    def fill(self: Any, name: str, layers: Any, piece: Any, received: bool) -> None:
        loss = layers.get("loss_fn.") if received and name.startswith("loss_fn.") else None
        before = None if loss is None else loss.state_dict()[name.removeprefix("loss_fn.")].clone()
        original(self, name, layers, piece, received)
        if loss is not None:
            hit()
            loss.state_dict()[name.removeprefix("loss_fn.")].copy_(before)

    return fill


def _says_nothing(original: Any, hit: Hit) -> Any:
    def refuse(*args: Any, **options: Any) -> None:
        hit()

    return refuse


def _keeps_as_many(original: Any, hit: Hit) -> Any:
    def freeze(self: Any, asked: str, entries: Any) -> None:
        if entries < self.frozen:
            hit()
        original(self, asked, max(self.frozen, entries))

    return freeze


def _keeps_frozen(original: Any, hit: Hit) -> Any:
    def keep_trained(optimizer: Any) -> None:
        hit()

    return keep_trained


LOSS, SHARED, SWITCHED = (
    "a loss stays behind",
    "copies of a shared weight are trained",
    "requires_grad is not looked at",
)
FEWER, FROZEN = "a policy's fewer entries change nothing", "frozen parameters stay in their groups"

MUTANTS = (
    Mutant(
        LOSS,
        "Replicas go on with a loss that was never trained.",
        ("ds_terapipe.elastic.moves.reshape:Reshape._fill",),
        _leaves_the_loss,
        "outside, loss",
    ),
    Mutant(
        SHARED,
        "Stages train copies of what their layers share.",
        ("ds_terapipe.pipeline.engine:refuse_split", "ds_terapipe.elastic.engine:refuse_split"),
        _says_nothing,
        "outside, shared weights",
    ),
    Mutant(
        SWITCHED,
        "What is frozen by hand goes on training.",
        ("ds_terapipe.pipeline.engine:TokenPipelineEngine._refuse_switched",),
        _says_nothing,
        "outside, switched",
    ),
    Mutant(
        FEWER,
        "Layers that a policy lets go stay frozen.",
        ("ds_terapipe.elastic.policies.freezer:Freezer._freeze",),
        _keeps_as_many,
        "outside, policy",
    ),
    Mutant(
        FROZEN,
        "A group of frozen parameters is none that is empty.",
        ("tests.elastic.test_groups:keep_trained",),
        _keeps_frozen,
        "outside, groups",
    ),
)


def _check(name: str, measure: str, args: Sequence[str], catches: str) -> Check:
    blind = {mutant.name: f"is about {name.partition(', ')[2]} alone" for mutant in MUTANTS if mutant.name != catches}
    return Check(name, measure, tuple(args), (catches,), blind)


_OUTSIDE, _PASSES = "tests.elastic.test_elastic_outside:holds_for", "tests.mutants.claims:passes"

CHECKS = (
    _check("outside, loss", _OUTSIDE, ("losses", "fp32"), LOSS),
    _check("outside, shared weights", _OUTSIDE, ("shared", "head's weight"), SHARED),
    _check("outside, switched", "tests.pipeline.test_frozen:names_what_is_switched", (), SWITCHED),
    _check(
        "outside, policy",
        _PASSES,
        ("tests.elastic.test_freeze:test_a_schedule_has_fewer_frozen_only_where_it_may",),
        FEWER,
    ),
    _check(
        "outside, groups",
        _PASSES,
        ("tests.elastic.test_groups:test_frozen_parameters_leave_and_an_empty_group_gets_one_that_nothing_uses",),
        FROZEN,
    ),
)
