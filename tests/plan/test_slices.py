"""The cuts of a sequence, against all cuts there are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan import Cuts, best_cut, even_cuts, group_sequences, slice_times
from tests.plan.costs import ExampleCost, compositions


def of_cut(times, counts):
    starts = [0, *itertools.accumulate(counts)]
    return [times[start, count - 1] for start, count in zip(starts, counts, strict=False)]


def table(n, value):
    """Times of slices: ``value(start, count)`` of those that end within n."""
    times = np.full((n, n), np.inf)
    for start in range(n):
        for count in range(1, n - start + 1):
            times[start, count - 1] = value(start, count)
    return times


@st.composite
def tables(draw, most):
    """Any times: with plateaus, falling, infinite where a slice is too short; or many that are close."""
    n, least = draw(st.integers(1, most)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        random = draw(st.randoms(use_true_random=False))
        return table(n, lambda at, count: 1 + count * (1 + random.random() / 4))
    values = draw(st.lists(st.integers(1, 40), min_size=n * n, max_size=n * n))
    return table(n, lambda at, count: values[at * n + count - 1] / 8 if count >= least or count == n else np.inf)


@settings(deadline=None, max_examples=200)
@given(tables(most=11), st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0, 7.0, 47.0]))
def test_the_programme_finds_the_best_of_all_cuts(times, weight):
    cut = best_cut(times, weight)
    own = of_cut(times, cut.counts)
    assert sum(cut.counts) == len(times) and (cut.total, cut.slowest) == (pytest.approx(sum(own)), max(own))
    all_cuts = [of_cut(times, counts) for counts in compositions(len(times))]
    best = min(sum(t) + weight * max(t) for t in all_cuts if math.isfinite(sum(t)))
    assert cut.total + weight * cut.slowest == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=80)
@given(tables(most=8), st.integers(1, 8))
def test_even_cuts_have_the_least_squares_for_each_number(times, most):
    found = even_cuts(times, most)
    for count in range(1, most + 1):
        costs = [of_cut(times, c) for c in compositions(len(times)) if len(c) == count]
        finite = [sum(t * t for t in cost) for cost in costs if all(map(math.isfinite, cost))]
        assert (count in found) == bool(finite)
        if finite:
            own = of_cut(times, found[count])
            assert len(own) == count and sum(t * t for t in own) == pytest.approx(min(finite), rel=1e-9)


def test_times_are_those_of_the_slowest_stage():
    cost = ExampleCost([1.0, 1.0, 3.0, 2.0])
    times = slice_times(cost, 4, Cuts.of(100, granularity=8, min_length=16))
    assert times.shape == (12, 12)  # quanta of 8, the last one with the 4 tokens that remain
    assert times[0, 1] == pytest.approx(cost.forward(2, 16, 0) + cost.backward(2, 16, 0))
    assert times[3, 8] == pytest.approx(3 * cost.forward(2, 76, 24))
    assert np.isinf(times[0, 0]) and np.isinf(times[3, 9])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_lengths_keep_the_rules(total, granularity, least, multiple):
    total = max(total, least) * multiple
    cuts = Cuts.of(total, granularity, least, multiple)
    lengths = cuts.lengths(best_cut(slice_times(ExampleCost([1.0]), 1, cuts), 20.0).counts)
    assert sum(lengths) == total and min(lengths) >= least
    assert all(length % granularity == 0 for length in lengths[:-1])
    assert all(length % multiple == 0 for length in lengths)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Cuts.of(100, granularity=0), "granularity: got 0, must be a positive number of tokens"),
        (lambda: Cuts.of(100, min_length=101), "length: got 100, must be at least the shortest slice, 101 tokens"),
        (lambda: Cuts.of(100, multiple_of=8), "length: got 100, must be a multiple of 8, which .* use e.g. 104"),
        (lambda: group_sequences({2: np.ones((1, 1))}, 3, 2), r"sequences: got 3, must be a sum of group sizes \[2\]"),
    ],
)
def test_rules_that_cannot_be_kept_are_errors(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
