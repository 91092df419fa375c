"""Ways in which a plan can be made wrongly: a programme that does not find the best cut, times that leave something out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ds_terapipe.schedule import Op
from tests.mutants.harness import Check, Hit, Mutant


def _evened(counts: Sequence[int]) -> tuple[int, ...]:
    length, longer = divmod(sum(counts), len(counts))
    return tuple(length + (i < longer) for i in range(len(counts)))


def _equal_cut(original: Any, hit: Hit) -> Any:
    def best_cut(times: Any, weight: float) -> Any:
        found = original(times, weight)
        counts = _evened(found.counts)
        starts = np.cumsum([0, *counts[:-1]])
        own = times[starts, np.array(counts) - 1]
        if counts == found.counts or not np.isfinite(own).all():
            return found
        hit()
        return found._replace(counts=counts, total=float(own.sum()), slowest=float(own.max()))

    return best_cut


def _equal_cuts(original: Any, hit: Hit) -> Any:
    def even_cuts(times: Any, most: int) -> dict[int, tuple[int, ...]]:
        found = original(times, most)
        equal = {count: _evened(counts) for count, counts in found.items()}
        if equal != found:
            hit()
        return equal

    return even_cuts


def _no_bound(original: Any, hit: Hit) -> Any:
    def walk(solve: Any, measure: Any, weight: float) -> Any:
        hit()
        return solve(math.inf)

    return walk


def _forgetting(kind: str) -> Any:
    """Actions of one kind wait for their own stage only."""

    def replacement(original: Any, hit: Hit) -> Any:
        def dependencies(grid: Any, placement: Any = None) -> Any:
            graph = original(grid, placement)
            hit()
            also = [
                first if getattr(action.op, kind) else second
                for action, first, second in zip(graph.actions, graph.after, graph.also_after, strict=True)
            ]
            return graph._replace(also_after=also)

        return dependencies

    return replacement


def _free_weights(original: Any, hit: Hit) -> Any:
    def durations_of(graph: Any, duration: Any, message: Any = None) -> list[float]:
        found = original(graph, duration, message)
        for index, action in enumerate(graph.actions):
            if action.op is Op.WEIGHT_GRADIENTS:
                hit()
                found[index] = 0.0
        return found

    return durations_of


class _AtTheStart:
    """A cost model's slices, all of them with nothing before them."""

    def __init__(self, cost: Any) -> None:
        self._cost = cost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cost, name)

    def forward(self, stage: int, length: Any, context: Any) -> Any:
        return self._cost.forward(stage, length, 0 * context)

    def backward(self, stage: int, length: Any, context: Any) -> Any:
        return self._cost.backward(stage, length, 0 * context)


def _no_context(original: Any, hit: Hit) -> Any:
    def init(self: Any, cost: Any, *args: Any, **kwargs: Any) -> None:
        hit()
        original(self, _AtTheStart(cost), *args, **kwargs)

    return init


EQUAL_CUT = "the programme gives equal slices"
EQUAL_CUTS = "even cuts are equal lengths"
NO_BOUND = "the slowest slice is not bounded"
RECEIVE = "a receive does not wait for its message"
SEND = "a message does not wait for the one before it"
WEIGHTS = "weight gradients take no time"
CONTEXT = "what is before a slice costs nothing"

_USED_BY = ("ds_terapipe.plan.choose:", "tests.plan.test_slices:")
_GRAPHS = (
    "ds_terapipe.schedule.simulate:dependencies",
    "ds_terapipe.schedule.replay:dependencies",
    "ds_terapipe.plan.evaluate:dependencies",
)

MUTANTS = (
    Mutant(
        EQUAL_CUT,
        "TeraPipe's programme gives equal slices, as many as its optimum has.",
        tuple(place + "best_cut" for place in _USED_BY),
        _equal_cut,
        "cuts, all there are",
    ),
    Mutant(
        EQUAL_CUTS,
        "Cuts of equal cost are of equal lengths.",
        tuple(place + "even_cuts" for place in _USED_BY),
        _equal_cuts,
        "cuts, all there are",
    ),
    Mutant(
        NO_BOUND,
        "The programme finds the least sum of times, whatever the slowest slice takes.",
        ("ds_terapipe.plan.slices:_walk",),
        _no_bound,
        "cuts, all there are",
    ),
    Mutant(
        RECEIVE,
        "A stage goes on without what it receives.",
        _GRAPHS,
        _forgetting("is_receive"),
        "simulator, event loop",
    ),
    Mutant(
        SEND,
        "All messages of a channel are on their way at once.",
        _GRAPHS,
        _forgetting("is_send"),
        "simulator, event loop",
    ),
    Mutant(
        WEIGHTS,
        "The actions W of a step are free.",
        ("ds_terapipe.schedule.simulate:durations_of",),
        _free_weights,
        "simulator, event loop",
    ),
    Mutant(
        CONTEXT,
        "A slice costs as much at the end of a sequence as at its start.",
        ("ds_terapipe.plan.evaluate:StepTimes.__init__",),
        _no_context,
        "step times, work of a stage",
    ),
)

_NAMES = tuple(mutant.name for mutant in MUTANTS)


def _check(name: str, measure: str, args: tuple[Any, ...], catches: tuple[str, ...], why: str) -> Check:
    return Check(name, measure, args, catches, {other: why for other in _NAMES if other not in catches})


CHECKS = (
    _check(
        "cuts, all there are",
        "tests.plan.test_slices:cuts_off_by",
        (),
        (EQUAL_CUT, EQUAL_CUTS, NO_BOUND),
        "is given the times of slices",
    ),
    _check(
        "simulator, event loop",
        "tests.schedule.test_simulate:ends_off_by",
        (),
        (RECEIVE, SEND, WEIGHTS),
        "is given a grid and the times of its actions",
    ),
    _check(
        "step times, work of a stage",
        "tests.plan.test_choose:work_off_by",
        (),
        (WEIGHTS, CONTEXT),
        "is about what a stage computes, not when, with slices that are given",
    ),
)
