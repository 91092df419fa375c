"""The order of a plan improved by search (`schedule.search`) over the same costs, and under the same memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryModel
from ds_terapipe.plan.evaluate import Candidate, StepTimes
from ds_terapipe.plan.request import Request
from ds_terapipe.plan.slices import Cuts
from ds_terapipe.schedule import SEARCHED, Action, Op, order, text_of, with_weight_gradients
from ds_terapipe.schedule.numbered import Numbered, Problem
from ds_terapipe.schedule.search import search

GAIN = 0.01
"""Share of the best named order's time that a searched one must save: less is not worth an order without a name."""

_CUTS = (0.25, 0.5, 1.0, 2.0)  # weights of the part of a slice's forward that grows with its context
_ENOUGH = 4  # micro-batches for each place that leave nothing worth a search
_LITTLE = 0.02  # of the work: weight gradients that fill no wait
_LARGE = 12_000  # actions of a step


def why_not(times: StepTimes, schedule: str, lengths: Sequence[int]) -> str:
    """Return why no search pays for a step that is best in these slices; empty where one may."""
    places, micro_batches = times.placement.places, times.micro_batches
    if places == 1:
        return "one place waits for no other"
    if micro_batches >= _ENOUGH * places:
        return f"{micro_batches} micro-batches fill {places} places without"
    if times.placement.is_plain:  # nothing but weight gradients can move
        if not times.weights_once or len(lengths) == 1:
            return "weight gradients are not made apart"
        own = times.slice_seconds(lengths)
        weights = own.weights.sum() / (own.forward.sum() + own.backward.sum() + own.weights.sum())
        if weights < _LITTLE:
            return f"weight gradients are {weights:.0%} of the work"
    shares = times.simulate(schedule, lengths).bubble_shares
    if shares["messages"] > shares["fill"] + shares["imbalance"]:
        return "messages take longer than all other waits"
    return ""


def improve(times: StepTimes, request: Request, schedule: str, cuts: Sequence[tuple[int, ...]]) -> Candidate | None:
    """Return a searched order that saves `GAIN` of the best named one's time; None where none does.

    Args:
        times: of steps.
        request: what it is for.
        schedule: the best named one.
        cuts: tokens of the slices; those that the schedule has are the first.
    """
    most = times.seconds(schedule, cuts[0]) * (1 - GAIN)
    worth = [cut for cut in dict.fromkeys(cuts) if times.bound(cut) < most]
    problems = [_problem(times, request, schedule, cut) for cut in worth]
    if not problems or Numbered(problems[0]).size > _LARGE:
        return None
    starts = [order(schedule, times.placement, problems[0].slices)]
    found = search(problems, starts, request.search_s)
    if found is None:
        return None
    better = Candidate(0.0, SEARCHED, worth[found.problem], text_of(found.grid))
    better = better._replace(seconds=times.seconds(better.runs, better.lengths))
    # the search knows only roughly what a step holds
    return better if better.seconds <= most and request.fits(better.runs, better.lengths) else None


def other_cuts(times: StepTimes, request: Request, lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield cuts into as many slices of equal forward cost, with several weights for what grows with the context."""
    count, cuts = len(lengths), Cuts(request.seq_length, request.granularity)
    short = float(request.least)  # the shortest slice whose seconds are known
    context = np.minimum(cuts.quantum * np.arange(cuts.quanta, dtype=float), cuts.total - short)
    alone, deeper = np.zeros(cuts.quanta), np.zeros(cuts.quanta)
    for stage in range(times.stages):
        seconds = times.cost.forward(stage, np.full(cuts.quanta, short), context)
        alone += seconds[0]
        deeper += seconds - seconds[0]
    for weight in _CUTS:
        sums = np.cumsum(alone + weight * deeper)
        ends = np.searchsorted(sums, sums[-1] * np.arange(1, count) / count) + 1
        cut = cuts.lengths(np.diff([0, *ends, cuts.quanta]).tolist())
        if request.allows(cut):
            yield cut


def _problem(times: StepTimes, request: Request, schedule: str, lengths: tuple[int, ...]) -> Problem:
    """Return the step in these slices as a problem of search."""
    slices = [len(lengths)] * times.micro_batches
    seconds, message = times.by_action(lengths, lambda action: lengths[action.unit.slice])
    apart = times.weights_once and len(lengths) > 1
    problem = Problem(times.placement, slices, seconds, message, apart=apart)
    if request.memory is None or request.memory_gb is None:
        return problem
    problem = problem._replace(takes=_takes(request.memory, lengths))
    grid = with_weight_gradients(order(schedule, times.placement, slices), times.placement, None if apart else ())
    numbered = Numbered(problem)
    # what is not counted is taken to be as much as in the named order
    limits = [
        request.memory_gb * GIGABYTE - use.total + numbered.peak(row)
        for use, row in zip(request.memory_of(schedule, lengths), numbered.rows_of(grid), strict=True)
    ]
    return problem._replace(limits=limits)


def _takes(model: MemoryModel, lengths: Sequence[int]) -> Callable[[Action], float]:
    """Return the bytes that an action takes: activations, operands of weight gradients, keys and values, their gradients."""
    whole, last = (sum(lengths) if len(lengths) > 1 else 0), len(lengths) - 1

    def takes(action: Action) -> float:
        own, slice_ = model.stages[action.stage], action.unit.slice
        length = lengths[slice_]
        if action.op is Op.WEIGHT_GRADIENTS:
            return -own.weight_gradients * length
        if action.op is Op.FORWARD:
            return own.activations * length + own.keys_values * whole * (slice_ == 0)
        return (
            (own.weight_gradients - own.activations) * length
            + own.key_value_gradients * whole * (slice_ == last)
            - (own.key_value_gradients + own.keys_values) * whole * (slice_ == 0)
        )

    return takes
