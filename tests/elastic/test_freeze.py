"""Freeze policies follow the published tables and their rules, and a run that goes on decides as one that was not stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_terapipe.elastic.policies.freeze import (
    FreezePolicy,
    GradNormPolicy,
    ModelLayers,
    policy_class,
    policy_names,
    register_policy,
)
from ds_terapipe.elastic.policies.freezer import Freezer, Signals, completed_intervals
from ds_terapipe.elastic.settings import FreezeSettings
from ds_terapipe.errors import ConfigError, shown
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


def saved(frozen: Freezer) -> Any:
    return json.loads(json.dumps(frozen.state()))


def grad_norm(model: ModelLayers, alpha: float) -> GradNormPolicy:
    return GradNormPolicy(FreezeSettings(policy="grad_norm", alpha=alpha), model)


def test_entries_without_parameters_do_not_count() -> None:
    model = ModelLayers((False, True, False, True, False, True, False))
    assert (model.head, model.before_head) == (5, (1, 3))
    assert [model.prefix(count) for count in range(3)] == [0, 2, 4]
    assert [model.frozen_of(frozen) for frozen in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="count: got 3, must be from 0 to the 2 trainable entries"):
        model.prefix(3)
    with pytest.raises(ConfigError, match=r"no parameter with requires_grad, .*use requires_grad_"):
        ModelLayers((False, False))
    alpha = freezer(ModelLayers((True, False, True, True, False, True, True, False)), 10, policy="alpha", alpha=0.5)
    assert decided(alpha, (0, 9, 10, 19, 20, 30, 1000)) == [0, 0, 3, 3, 4, 6, 6]
    norms = grad_norm(ModelLayers((True, False, True, False, True, True, False)), 0.9)
    assert norms.at_interval(1, 0, [9, 0, 1, 0, 9, 9, 0]) == 1
    assert norms.at_interval(1, 0, [9, math.nan, 9, 0, 1, 9, math.nan]) == 3
    assert norms.at_interval(1, 3, [0, 0, 0, 0, 9, 1, 0]) == 5


def test_static_freezes_nothing_and_a_schedule_holds_from_its_steps_on() -> None:
    static = freezer(4, policy="static")
    assert decided(static, range(5)) == [0] * 5 and not static.needs_gradients
    pairs = [[10, 2], [20, 4]]
    frozen = freezer(6, interval=7, policy="schedule", frozen_layers=pairs)
    assert decided(frozen, range(25)) == [0] * 10 + [2] * 10 + [4] * 5
    assert freezer(6, policy="schedule", frozen_layers=pairs).decide(20, no_norms) == 4
    for settings in ({}, {"policy": "schedule", "frozen_layers": [[1, 1]]}):  # neither asks how many intervals are over
        Freezer(FreezeSettings(**settings), ModelLayers((True, True)), no_norms).decide(3, no_norms)


# Frozen layers after 1 to 9 intervals, as the paper's code has them for 12 layers, and for 24.
TABLE = {
    (12, 1 / 2): [6, 9, 11, 12, 12, 12, 12, 12, 12],
    (12, 1 / 3): [4, 7, 9, 10, 11, 11, 12, 12, 12],
    (12, 1 / 5): [3, 5, 6, 8, 9, 9, 10, 10, 11],
    (24, 1 / 3): [8, 14, 17, 20, 21, 22, 23, 24, 24],
}


@pytest.mark.parametrize(("count", "alpha"), TABLE)
def test_alpha_is_the_published_table(count: int, alpha: float) -> None:
    assert decided(freezer(count, policy="alpha", alpha=alpha), range(10)) == [0, *TABLE[count, alpha]]


@given(st.integers(0, 100), st.integers(1, 99), st.integers(0, 4))
@example(10, 30, 1)
def test_alpha_is_rounded_up_as_in_exact_arithmetic(count: int, percent: int, intervals: int) -> None:
    """10 (1 - 0.7) is 3, and above it in floating point."""
    exact = math.ceil(count * (1 - (1 - Fraction(percent, 100)) ** intervals))
    assert freezer(count, policy="alpha", alpha=percent / 100).decide(intervals, no_norms) == exact


@pytest.mark.parametrize("before", ["begun", "begun and saved", "another policy"])
def test_intervals_before_a_policy_was_asked_for_do_not_count(before: str) -> None:
    frozen, again = (freezer(12, 10, policy="alpha", alpha=1 / 3) for _ in range(2))
    first = freezer(12, 10, policy="static") if before == "another policy" else frozen
    if before == "another policy":
        assert decided(first, range(96)) == [0] * 96
    else:
        first.begin(95)
    if before != "begun":
        frozen = again
        frozen.load(first.state())
    assert decided(frozen, (96, 99, 100, 110, 120)) == [0, 0, *TABLE[12, 1 / 3][:3]]


NAN = math.nan


@pytest.mark.parametrize(
    ("frozen", "norms", "after"),
    [
        (0, [9, 9, 9, 9, 9, 1], 3),  # the bound: ceil(0.5 x 5)
        (0, [9, 9, 1, 9, 9, 9], 2),  # the smallest one goes on training
        (0, [1, 9, 9, 9, 9, 9], 0),
        (0, [9, 1, 1, 9, 9, 1], 1),  # a tie
        (2, [0, 0, 9, 9, 9, 1], 4),  # what is frozen does not count
        (5, [0, 0, 0, 0, 0, 1], 5),
        (0, [NAN, 1, NAN, 9, 9, 9], 1),  # nothing measured
        (1, [0] + [NAN] * 5, 1),
        (0, [math.inf, 9, 9, 9, 9, math.inf], 1),
        (2, [NAN, 0, 9, 9, 9, 1], 4),
        (2, None, 2),
    ],
)
def test_grad_norm_freezes_up_to_the_smallest_norm(frozen: int, norms: Any, after: int) -> None:
    assert grad_norm(ModelLayers((True,) * 6), 0.5).at_interval(1, frozen, norms) == after


def frozen_by_plateau(history: list[list[float]], cut: int | None = None, **settings: Any) -> list[int]:
    """Entries that are frozen after each interval with these norms, of three layers and the head; ``cut``: resumed there."""
    found, numbers = freezer(3, policy="plateau", **settings), []
    for step, norms in enumerate(history, start=1):
        numbers.append(found.decide(step, lambda norms=norms: [*norms, 1.0]))
        if step == cut:
            state, found = saved(found), freezer(3, policy="plateau", **settings)
            found.load(state)
    return numbers


def test_a_plateau_freezes_from_the_front_after_some_intervals_and_at_most_a_share() -> None:
    still = [[1.0, 1.0, 1.0]] * 6
    assert frozen_by_plateau(still, patience=2, alpha=0.9) == [0, 0, 3, 3, 3, 3]
    assert frozen_by_plateau(still, patience=2, alpha=0.3) == [0, 0, 1, 2, 3, 3]
    assert frozen_by_plateau(still, patience=4, alpha=0.9) == [0, 0, 0, 0, 3, 3]
    # the second one waits for the first one
    moving = [[float(step), 1.0, 1.0] for step in (1, 2, 4, 8)] + [[8.0, 1.0, 1.0]] * 2
    assert frozen_by_plateau(moving, patience=2, alpha=0.9) == [0, 0, 0, 0, 0, 3]
    history = [[1.0, 1.0, 1.0], [1.05, 2.0, 1.0], [1.1, 2.0, 1.0], [1.1, 2.0, 1.0], [1.2, 2.1, 1.1]]
    of_cuts = [frozen_by_plateau(history, cut, patience=2, alpha=0.4) for cut in (None, 1, 2, 3, 4)]
    assert of_cuts == [of_cuts[0]] * 5 and of_cuts[0][-1] > 0


@pytest.mark.parametrize(
    ("norms", "frozen"),
    [
        ((1.0, 1.05, 1.05, 1.05), [0, 0, 1, 2]),
        ((1.0, 1.05, 1.22, 1.22), [0, 0, 0, 1]),  # by 16%: neither counts nor begins again
        ((1.0, 1.05, 1.30, 1.30), [0, 0, 0, 0]),  # by 24%
        ((1.0, NAN, 1.0, NAN), [0, 0, 0, 0]),
        ((0.0, 0.0, 0.0, 0.0), [0, 0, 0, 0]),
    ],
)
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

    def state(self) -> dict[str, Any]:
        return {"asked": list(self.asked)}

    def load(self, state: Any) -> None:
        self.asked = list(state["asked"])


def wild(model: ModelLayers | int, interval: int = 1, unfreeze: Sequence[str] = (), **more: Any) -> Freezer:
    with registered("mine", type("Mine", (Wild,), more)):
        return freezer(model, interval, policy="mine", unfreeze=list(unfreeze))


@pytest.mark.parametrize("answer", [None, 2.5, 2.0, True, "2", float("nan")])
def test_a_policy_that_does_not_return_an_integer_is_named(answer: Any) -> None:
    for method in ("at_step", "at_interval"):
        with pytest.raises(ConfigError) as refused:
            wild(4, **{method: lambda self, *asked: answer}).decide(1, lambda: [])
        got = f"elastic_pipeline.freeze.policy: got {shown(answer)} from Mine.{method}"
        assert str(refused.value) == f"{got}, must be a number of entries, use an integer"


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


@pytest.mark.parametrize("unfreeze", [[], ["lr_restart", "loss_rise"]])
def test_a_policy_that_answers_fewer_entries_than_before_and_may_not_is_named(unfreeze: list[str]) -> None:
    frozen = wild(6, 100, unfreeze, answers=(4, 4, 2, 0))
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
    assert plain._policy.asked == [(4, 0, None)] and not plain.needs_gradients


@given(st.integers(0, 30), st.integers(1, 6), st.sampled_from(["schedule", "alpha", "grad_norm"]))
def test_a_loaded_run_decides_as_one_that_went_on(saved_at: int, interval: int, policy: str) -> None:
    settings = {"schedule": {"frozen_layers": [[5, 1], [17, 4]]}, "alpha": {"alpha": 0.2}, "grad_norm": {"alpha": 0.2}}
    going_on, stopped, resumed = (freezer(8, interval, policy=policy, **settings[policy]) for _ in range(3))

    def run(frozen: Freezer, steps: range) -> list[int]:
        return [frozen.decide(t, lambda t=t: [1 + (t * (index + 3)) % 7 for index in range(9)]) for t in steps]

    run(stopped, range(saved_at + 1))
    resumed.load(saved(stopped))
    assert resumed.frozen == stopped.frozen
    assert run(resumed, range(saved_at, 40)) == run(going_on, range(40))[saved_at:]


def test_a_checkpoint_has_a_policys_own_state_for_it_alone_and_frozen_layers_for_any() -> None:
    with registered("wild", Wild), registered("other", type("Other", (Wild,), {})):
        first, same, other = (freezer(3, policy=name) for name in ("wild", "wild", "other"))
    first.decide(3, lambda: [1.0])
    for frozen in (same, other):
        frozen.load(saved(first))
    assert same._policy.asked == [[3, 0, [1.0]]] and other._policy.asked == []
    first, second = freezer(4, policy="schedule", frozen_layers=[[1, 3]]), freezer(4, policy="static")
    first.decide(5, no_norms)
    second.load(first.state())
    assert second.frozen == 3 == second.decide(6, no_norms)


def test_an_interval_is_a_number_of_steps_or_an_epoch_of_samples() -> None:
    assert [completed_intervals(10, step, 4, None) for step in (0, 9, 10, 25)] == [0, 0, 1, 2]
    # 10 samples, 4 a step: the third step ends the first epoch
    assert [completed_intervals("epoch", step, 4, 10) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="must be a number of steps where there is no training_data"):
        completed_intervals("epoch", 1, 4, None)
    # whether a policy reads it follows from what it overrides, or it says so
    assert [policy_class(name).decides_at_intervals for name in policy_names()] == [False, False, True, True, True]
    assert type("Inherited", (Wild,), {}).decides_at_intervals
    assert not type("Said", (Wild,), {"decides_at_intervals": False}).decides_at_intervals


def test_the_registry_refuses_what_is_no_policy_or_has_anothers_name() -> None:
    with pytest.raises(ValueError, match="must be a class, use a subclass of"):
        register_policy("mine", object)
    with pytest.raises(ValueError, match='policy: got "alpha" a second time, must be a name of its own'):
        register_policy("alpha", Wild)
    register_policy("alpha", policy_class("alpha"))
    with pytest.raises(ConfigError, match=r'got "alpa", must be "static" or .*, use "alpha"'):
        policy_class("alpa")


def frozen_with(rates: list[float], pairs: list[list[int]], losses: Sequence[float] = (), **more: Any) -> list[int]:
    """Frozen entries of steps with these rates, where the mean loss before each is that of ``losses``."""
    schedule = {"policy": "schedule", "frozen_layers": pairs} if pairs else {"policy": "alpha", "alpha": 0.5}
    found, told = freezer(4 if pairs else 8, **schedule, **more), losses or [1.0] * len(rates)
    return [found.decide(step, no_norms, Signals(rate, lambda at=step: told[at])) for step, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("rates", "frozen"),
    [
        ([1, 1, 0.5, 0.4, 1, 1], [0, 2, 2, 2, 0, 0]),  # a warm restart
        ([1, 1, 0.5, 0.0, 0.1, 1], [0, 2, 2, 2, 0, 0]),  # a phase that is ramped from zero
        ([0, 0.2, 0.4, 0.8, 1, 0.9], [0, 2, 2, 2, 2, 2]),  # a warm-up is none
        ([1, 1, 0.8, 0.9, 0.7, 0.9], [0, 2, 2, 2, 2, 2]),  # nor is a little up and down
        ([1, 0.5, 0.25, 0.125, 0.06, 0.03], [0, 2, 2, 2, 2, 2]),  # nor steps down
    ],
)
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


@pytest.mark.parametrize(
    ("first", "unfreeze", "interval", "frozen"),
    [
        (1, "loss_rise", 1, [0, 2, 2, 2, 0, 0]), (1, "loss_rise", 2, [0, 2, 2, 2, 0, 0]),
        (1, "lr_restart", 1, [0, 2, 2, 2, 2, 2]), (9, "loss_rise", 1, [0] * 6),
    ],
)  # fmt: skip
def test_a_loss_above_the_lowest_of_an_interval_has_all_train_again(first, unfreeze, interval, frozen):
    losses = [9.0, 4.0, 4.1, 4.1, 4.4, 4.2]
    assert frozen_with([1.0] * 6, [[first, 2]], losses, unfreeze=[unfreeze], interval=interval) == frozen
