"""Optimal cuts of a sequence: TeraPipe's dynamic programme, exactly, and cuts of equal cost for slice-level 1F1B.

TeraPipe (arXiv 2102.07988, section 3.3) minimises T = sum t_i + (K - 1) max t_i over the slices: with the flush order that
is the time of K equal stages. For each bound on the slowest slice a dynamic programme over the tokens finds the least sum.
The bounds are walked downwards: the least sum under a bound has a slowest slice of its own, so the next bound is the largest
latency strictly below it, and at the same time low enough that a sum which can only grow may still win. Nothing is skipped
that could be better, so no tolerance is needed and the result is the optimum.

With 1F1B that objective is wrong when slices cost unequal amounts: forwards and backwards of unlike slices meet. There the
slices should cost the same, so `even_cuts` has the most even cut for each number of slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.plan.stages import least_sums
from ds_terapipe.schedule import Placement, as_placement

Times = NDArray[np.float64]
"""[quanta, quanta]: seconds of the slice that starts at quantum j and has k + 1 quanta; infinite if not allowed."""


class Cuts(NamedTuple):
    """Allowed cuts of a sequence: between quanta of tokens.

    Attributes:
        total: tokens of the sequence.
        quantum: tokens of a quantum; every slice but the last is a multiple of it, the last one takes what remains.
        least: tokens of the shortest slice that is allowed, at most ``total``.
        most: tokens of the longest one, None without limit.
    """

    total: int
    quantum: int = 8
    least: int = 1
    most: int | None = None

    @property
    def quanta(self) -> int:
        """Number of quanta, at least one."""
        return max(self.total // self.quantum, 1)

    def lengths(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Convert slices of so many quanta to tokens."""
        tokens = [count * self.quantum for count in counts]
        return (*tokens[:-1], self.total - sum(tokens[:-1]))


class Cut(NamedTuple):
    """A cut: quanta of each slice, the sum of the slices' times and the slowest one's, in seconds."""

    counts: tuple[int, ...]
    total: float
    slowest: float


def slice_times(cost: Cost, stages: int | Placement, cuts: Cuts) -> Times:
    """Forward and backward of every possible slice on the place that is slowest with it.

    Args:
        cost: for micro-batches of one size.
        stages: their placement, or how many there are, each on a place of its own.
        cuts: where the sequence may be cut.

    Returns:
        [quanta, quanta] in seconds; see `Times`. All infinite where no slice is allowed.
    """
    n = cuts.quanta
    start, count = np.nonzero(np.add.outer(np.arange(n), np.arange(1, n + 1)) <= n)
    count = count + 1
    allowed = (count * cuts.quantum >= cuts.least) | (count == n)
    start, count = start[allowed], count[allowed]
    context = (start * cuts.quantum).astype(float)
    length = np.where(start + count == n, cuts.total - context, count * float(cuts.quantum))
    if cuts.most is not None:
        short = length <= cuts.most
        start, count, context, length = start[short], count[short], context[short], length[short]
    times = np.full((n, n), np.inf)
    if len(length) == 0:
        return times
    where, seen = as_placement(stages), dict[bytes, NDArray[np.float64]]()
    probe = np.unique(np.linspace(0, len(length) - 1, 4 * n).astype(int))
    for place in range(where.places):
        # places that agree on every probed slice are equal: most pipelines have three kinds of stages
        marks = _both(cost, where, place, length[probe], context[probe]).tobytes()
        if marks not in seen:
            seen[marks] = _both(cost, where, place, length, context)
    times[start, count - 1] = np.max([*seen.values()], axis=0)
    return times


def _both(
    cost: Cost, where: Placement, place: int, length: NDArray[np.float64], context: NDArray[np.float64]
) -> NDArray[np.float64]:
    stages = where.stages_on(place)
    parts = [cost.forward(stage, length, context) for stage in stages]
    parts += [cost.backward(stage, length, context) for stage in stages if where.goes_backward(stage)]
    return np.asarray(np.sum(parts, axis=0))


def best_cut(times: Times, weight: float) -> Cut:
    """The cut with the least ``sum of times + weight * slowest time``: TeraPipe's optimum, exactly.

    Args:
        times: see `slice_times`; a cut is allowed.
        weight: (stages - 1) / micro-batches. K stages that run B micro-batches take B sum t + (K - 1) max t.
    """

    def score(cut: Cut) -> float:
        return cut.total + weight * cut.slowest

    best = current = _least_sum(times, math.inf)
    assert best is not None, "no slice is allowed"
    # a good cut early makes the walk short; what these probes miss, the walk finds
    bound = best.slowest
    for _ in range(16):
        bound *= 0.75
        found = _least_sum(times, bound)
        if found is None:
            break
        best = min(best, found, key=score)
    while current is not None and weight > 0:
        best = min(best, current, key=score)
        # sums only grow from here on: what is still to win sets how low the slowest must be
        to_win = math.nextafter((score(best) - current.total) / weight, math.inf)
        bound = min(math.nextafter(current.slowest, 0.0), to_win)
        current = _least_sum(times, bound) if bound > 0 else None
    return best


def even_cuts(times: Times, most: int) -> dict[int, tuple[int, ...]]:
    """Return for each number of slices up to ``most`` the most even cut: that with the least sum of squared times.

    Returns:
        Quanta of each slice, by number of slices; numbers for which there is no cut are left out.
    """
    n = len(times)
    starts = np.arange(n)
    squares = np.full((n + 1, n), np.inf)  # [end, start]
    scale = float(np.max(times[np.isfinite(times)], initial=np.finfo(float).tiny))
    for end in range(1, n + 1):
        squares[end, :end] = (times[starts[:end], end - 1 - starts[:end]] / scale) ** 2
    return least_sums(squares, most)


def _least_sum(times: Times, bound: float) -> Cut | None:
    """The cut with the least sum of times among those whose slices take at most ``bound``."""
    n = len(times)
    allowed = times <= min(bound, np.finfo(float).max)  # infinite times are no slices
    # quanta of the longest slice that is allowed from each start
    reach = np.where(allowed.any(axis=1), n - np.argmax(allowed[:, ::-1], axis=1), 0).tolist()
    bounded = np.where(allowed, times, np.inf)
    sums = np.full(n + 1, np.inf)
    sums[0] = 0.0
    for start in range(n):
        if reach[start]:
            ends = sums[start + 1 : start + 1 + reach[start]]
            np.minimum(ends, bounded[start, : reach[start]] + sums[start], out=ends)
    if math.isinf(sums[n]):
        return None
    counts: list[int] = []
    slowest, end = 0.0, n
    while end:
        starts = np.arange(end)
        own = bounded[starts, end - 1 - starts]
        start = int(np.argmin(sums[:end] + own))
        slowest = max(slowest, float(own[start]))
        counts.append(end - start)
        end = start
    return Cut(tuple(reversed(counts)), float(sums[n]), slowest)
