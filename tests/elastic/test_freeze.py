"""Freeze policies follow the published tables and their rules, and a run that goes on decides as one that was not stopped."""

import json
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from ds_terapipe.elastic.policies.freeze import FreezePolicy, GradNormPolicy, ModelLayers, register_policy
from ds_terapipe.elastic.policies.freezer import Freezer, Signals
from ds_terapipe.elastic.settings import FreezeSettings
from ds_terapipe.errors import ConfigError
from tests.elastic.samples import registered

STILL = Signals(1.0, lambda: None)
models = st.lists(st.booleans(), min_size=1, max_size=12).filter(any).map(lambda flags: ModelLayers(tuple(flags)))


def no_norms() -> Any:
    raise AssertionError("this policy reads no norms")


def freezer(model: ModelLayers | int, interval: int = 1, **settings: Any) -> Freezer:
    """For a model, or for so many trainable entries and a head."""
    model = ModelLayers((True,) * (model + 1)) if isinstance(model, int) else model
    return Freezer(FreezeSettings(**settings), model, lambda step: step // interval)


def decided(frozen: Freezer, steps: Sequence[int], norms: Callable[[], Any] = no_norms) -> list[int]:
    return [frozen.decide(step, norms) for step in steps]


def grad_norm(model: ModelLayers, alpha: float) -> GradNormPolicy:
    return GradNormPolicy(FreezeSettings(policy="grad_norm", alpha=alpha), model)


def test_entries_without_parameters_do_not_count() -> None:
    alpha = freezer(ModelLayers((True, False, True, True, False, True, True, False)), 10, policy="alpha", alpha=0.5)
    assert decided(alpha, (0, 9, 10, 19, 20, 30, 1000)) == [0, 0, 3, 3, 4, 6, 6]
    norms = grad_norm(ModelLayers((True, False, True, False, True, True, False)), 0.9)
    assert norms.at_interval(1, 0, [9, 0, 1, 0, 9, 9, 0]) == 1
    assert norms.at_interval(1, 0, [9, math.nan, 9, 0, 1, 9, math.nan]) == 3
    assert norms.at_interval(1, 3, [0, 0, 0, 0, 9, 1, 0]) == 5


THIRDS = [4, 7, 9, 10, 11, 11, 12]  # of twelve layers after 1 to 7 intervals, as the paper's code has them


@given(st.integers(0, 100), st.integers(1, 99), st.integers(0, 4))
@example(10, 30, 1)
def test_alpha_is_rounded_up_as_in_exact_arithmetic(count: int, percent: int, intervals: int) -> None:
    """10 (1 - 0.7) is 3, and above it in floating point."""
    exact = math.ceil(count * (1 - (1 - Fraction(percent, 100)) ** intervals))
    assert freezer(count, policy="alpha", alpha=percent / 100).decide(intervals, no_norms) == exact


@pytest.mark.parametrize(("before", "frozen"), [("begun", 0), ("another policy", 3)])
def test_intervals_before_a_policy_was_asked_for_do_not_count(before: str, frozen: int) -> None:
    first, second = freezer(12, 10, policy="schedule", frozen_layers=[[1, 3]]), freezer(12, 10, policy="alpha", alpha=1 / 3)
    if before == "begun":
        first = freezer(12, 10, policy="alpha", alpha=1 / 3)
        first.begin(95)
    else:
        decided(first, range(96))
    second.load(json.loads(json.dumps(first.state())))
    assert second.frozen == frozen and decided(second, range(96, 170)[::10]) == [frozen, *THIRDS]


NAN = math.nan


@pytest.mark.parametrize(("frozen", "norms", "after"), [
    (0, [9, 9, 9, 9, 9, 1], 3),  # the bound: ceil(0.5 x 5)
    (0, [9, 9, 1, 9, 9, 9], 2),  # the smallest one goes on training
    (0, [9, 1, 1, 9, 9, 1], 1),  # a tie
    (2, [0, 0, 9, 9, 9, 1], 4),  # what is frozen does not count
    (0, [NAN, 1, NAN, 9, 9, 9], 1),  # nothing measured
    (2, None, 2),
])  # fmt: skip
def test_grad_norm_freezes_up_to_the_smallest_norm(frozen: int, norms: Any, after: int) -> None:
    assert grad_norm(ModelLayers((True,) * 6), 0.5).at_interval(1, frozen, norms) == after


def frozen_by_plateau(history: list[list[float]], **settings: Any) -> list[int]:
    """Entries that are frozen after each interval with these norms, of three layers and the head."""
    found = freezer(3, policy="plateau", **settings)
    return [found.decide(step, lambda norms=norms: [*norms, 1.0]) for step, norms in enumerate(history, start=1)]


def test_a_plateau_freezes_from_the_front_after_some_intervals_and_at_most_a_share() -> None:
    still = [[1.0, 1.0, 1.0]] * 6
    assert frozen_by_plateau(still, patience=2, alpha=0.9) == [0, 0, 3, 3, 3, 3]
    assert frozen_by_plateau(still, patience=2, alpha=0.3) == [0, 0, 1, 2, 3, 3]
    # the second one waits for the first one
    moving = [[float(step), 1.0, 1.0] for step in (1, 2, 4, 8)] + [[8.0, 1.0, 1.0]] * 2
    assert frozen_by_plateau(moving, patience=2, alpha=0.9) == [0, 0, 0, 0, 0, 3]


@pytest.mark.parametrize(("norms", "frozen"), [
    ((1.0, 1.05, 1.05, 1.05), [0, 0, 1, 2]),
    ((1.0, 1.05, 1.22, 1.22), [0, 0, 0, 1]),  # by 16%: neither counts nor begins again
    ((1.0, 1.05, 1.30, 1.30), [0, 0, 0, 0]),  # by 24%
    ((1.0, NAN, 1.0, NAN), [0, 0, 0, 0]), ((0.0, 0.0, 0.0, 0.0), [0, 0, 0, 0]),
])  # fmt: skip
def test_a_plateau_is_left_at_twice_the_change_that_makes_it(norms: Sequence[float], frozen: list[int]) -> None:
    history = [[norm, 9.0, 9.0] for norm in norms]
    assert frozen_by_plateau(history, patience=2, alpha=0.01, tolerance=0.1) == frozen


class Wild(FreezePolicy):
    """Answers ``answers[step]`` and ``answers[interval]``, in turn, and counts how often it is asked."""

    needs_gradients = True
    answers: Sequence[Any] = ()

    def __init__(self, settings: FreezeSettings, model: ModelLayers) -> None:
        super().__init__(settings, model)
        self.asked: list[Any] = []

    def at_step(self, step: int, frozen: int) -> int:
        return self.answers[step % len(self.answers)] if self.answers else frozen

    def at_interval(self, completed: int, frozen: int, norms: Any) -> int:
        self.asked.append((completed, frozen, norms))
        return Wild.at_step(self, completed, frozen)


def wild(model: ModelLayers | int, interval: int = 1, unfreeze: Sequence[str] = (), **more: Any) -> Freezer:
    with registered("mine", type("Mine", (Wild,), more)):
        return freezer(model, interval, policy="mine", unfreeze=list(unfreeze))


@pytest.mark.parametrize("method", ["at_step", "at_interval"])
def test_a_policy_that_does_not_return_an_integer_is_named(method: str) -> None:
    got = f"elastic_pipeline.freeze.policy: got 2.5 from Mine.{method}, must be a number of entries, use an integer"
    with pytest.raises(ConfigError, match=f"^{re.escape(got)}$"):
        wild(4, **{method: lambda self, *asked: 2.5}).decide(1, lambda: [])


@given(models, st.lists(st.integers(-5, 20), min_size=1), st.lists(st.integers(0, 3), max_size=20))
def test_a_policy_may_unfreeze_where_it_is_said_and_never_freezes_the_head(model, answers, gaps):
    frozen, step, before = wild(model, 2, ["policy"], answers=answers), 0, 0
    for gap in gaps:
        step += gap
        now, asked = frozen.decide(step, lambda: [], STILL), len(frozen._policy.asked)
        assert now == frozen.frozen == min(max(answers[step % len(answers)], 0), model.head)
        assert frozen.reason == "policy" or now >= before
        assert frozen.decide(step, no_norms, STILL) == now  # a step is answered once
        assert len(frozen._policy.asked) == asked
        before = now


def test_a_policy_that_answers_fewer_entries_than_before_and_may_not_is_named() -> None:
    frozen = wild(6, 100, ["lr_restart", "loss_rise"], answers=(4, 4, 2, 0))
    assert [frozen.decide(step, no_norms, STILL) for step in range(2)] == [4, 4]
    with pytest.raises(ConfigError) as refused:
        frozen.decide(2, no_norms, STILL)
    assert str(refused.value) == (
        "elastic_pipeline.freeze.policy: got 2 from Mine.at_step, with 4 entries frozen, must be as many or more, use "
        'max(frozen, ...), or "unfreeze": ["policy"] to have layers train again'
    )


def test_a_policy_is_asked_once_an_interval_about_the_last_one_and_gets_norms_where_it_needs_them() -> None:
    frozen, asked = wild(3, 10), []
    for step in (0, 9, 10, 10, 11, 19, 55, 56, 60):
        frozen.decide(step, lambda step=step: asked.append(step) or [1.0] * 4)
    assert frozen._policy.asked == [(1, 0, [1.0] * 4), (5, 0, [1.0] * 4), (6, 0, [1.0] * 4)] and asked == [10, 55, 60]
    plain = wild(3, needs_gradients=False)
    plain.decide(4, no_norms)
    assert plain._policy.asked == [(4, 0, None)]


def test_the_registry_refuses_a_policy_with_the_name_of_another() -> None:
    with pytest.raises(ValueError, match='policy: got "alpha" a second time, must be a name of its own'):
        register_policy("alpha", Wild)


def frozen_with(rates: list[float], pairs: list[list[int]], losses: Sequence[float] = (), **more: Any) -> list[int]:
    """Frozen entries of steps with these rates, where the mean loss before each is that of ``losses``."""
    schedule = {"policy": "schedule", "frozen_layers": pairs} if pairs else {"policy": "alpha", "alpha": 0.5}
    found, told = freezer(4 if pairs else 8, **schedule, **more), losses or [1.0] * len(rates)
    return [found.decide(step, no_norms, Signals(rate, lambda at=step: told[at])) for step, rate in enumerate(rates)]


@pytest.mark.parametrize(("rates", "frozen"), [
    ([1, 1, 0.5, 0.4, 1, 1], [0, 2, 2, 2, 0, 0]),  # a warm restart
    ([1, 1, 0.5, 0.0, 0.1, 1], [0, 2, 2, 2, 0, 0]),  # a phase that is ramped from zero
    ([1, 1, 0.5, 0.0, 0.0, 0.0], [0, 2, 2, 2, 2, 2]),  # an end at zero is none
    ([0, 0.2, 0.4, 0.8, 1, 0.9], [0, 2, 2, 2, 2, 2]),  # nor is a warm-up, or one that begins with two steps at zero
    ([0, 0, 0.2, 0.4, 0.8, 0.9], [0, 2, 2, 2, 2, 2]),
    ([1, 1, 0.8, 0.9, 0.7, 0.9], [0, 2, 2, 2, 2, 2]),  # nor is a little up and down
    ([1, 0.5, 0.25, 0.125, 0.06, 0.03], [0, 2, 2, 2, 2, 2]),  # nor steps down
])  # fmt: skip
def test_an_lr_restart_has_all_train_again(rates: list[float], frozen: list[int]) -> None:
    assert frozen_with(rates, [[1, 2]], unfreeze=["lr_restart"]) == frozen
    assert frozen_with(rates, [[1, 2]]) == [0, 2, 2, 2, 2, 2]


def test_a_schedule_has_fewer_frozen_only_where_it_may_and_freezes_again_after_a_restart() -> None:
    pairs, rates = [[1, 3], [3, 1], [4, 2]], [1.0] * 6
    assert frozen_with(rates, pairs, unfreeze=["policy"]) == [0, 3, 3, 1, 2, 2]
    assert frozen_with(rates, pairs, unfreeze=["lr_restart"]) == [0, 3, 3, 3, 3, 3]
    rates = [1, 1, 0.2, 1, 1, 0.2, 1]
    assert frozen_with(rates, [[1, 3], [4, 1], [5, 4]], unfreeze=["lr_restart"]) == [0, 3, 3, 0, 1, 4, 0]
    # "alpha" counts intervals from there on
    assert frozen_with([1, 1, 0.2, 1, 0.9, 0.8], [], unfreeze=["lr_restart"]) == [0, 4, 6, 0, 4, 6]


@pytest.mark.parametrize(("first", "unfreeze", "interval", "frozen"), [
    (1, "loss_rise", 1, [0, 2, 2, 2, 0, 0]), (1, "loss_rise", 2, [0, 2, 2, 2, 0, 0]),
    (1, "lr_restart", 1, [0, 2, 2, 2, 2, 2]),
])  # fmt: skip
def test_a_loss_above_the_lowest_of_an_interval_has_all_train_again(first, unfreeze, interval, frozen):
    losses = [9.0, 4.0, 4.1, 4.1, 4.4, 4.2]
    assert frozen_with([1.0] * 6, [[first, 2]], losses, unfreeze=[unfreeze], interval=interval) == frozen
    below = [-1.0, -2.0, -2.05, -2.05, -1.9, -2.0]  # a loss that is lower where it is further from zero
    assert frozen_with([1.0] * 6, [[first, 2]], below, unfreeze=[unfreeze], interval=interval) == frozen
