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
from tests.mutants import applied

from .costs import ExampleCost

EXACT, ROUNDED = 1e-12, 1e-9
"""Relative tolerances of what is added up in the same order, and of squares."""


def compositions(total, least=1):
    yield (total,)
    for first in range(least, total - least + 1):
        yield from ((first, *rest) for rest in compositions(total - first, least))


def of_cut(times, counts):
    starts = [0, *itertools.accumulate(counts)]
    return [times[start, count - 1] for start, count in zip(starts, counts, strict=False)]


@st.composite
def tables(draw, most=9):
    """Any times whatsoever: with plateaus, falling, infinite where a slice is too short."""
    n = draw(st.integers(1, most))
    least = draw(st.integers(1, 3))
    values = draw(st.lists(st.integers(1, 40), min_size=n * n, max_size=n * n))
    times = np.full((n, n), np.inf)
    for start in range(n):
        for count in range(1, n - start + 1):
            if count >= least or count == n:
                times[start, count - 1] = values[start * n + count - 1] / 8
    return times


@settings(deadline=None, max_examples=150)
@given(tables(), st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0, 7.0, 47.0]))
def test_best_cut_is_the_best_of_all(times, weight):
    cut = best_cut(times, weight)
    own = of_cut(times, cut.counts)
    assert sum(cut.counts) == len(times)
    assert (cut.total, cut.slowest) == (pytest.approx(sum(own)), max(own))
    assert abs(above_the_best(times, weight, cut)) <= EXACT


def above_the_best(times, weight, cut):
    """By how much of the least objective of all cuts this one is above it."""
    all_cuts = [of_cut(times, counts) for counts in compositions(len(times))]
    best = min(sum(t) + weight * max(t) for t in all_cuts if math.isfinite(sum(t)))
    return (cut.total + weight * cut.slowest) / best - 1


def naive_optimum(times, weight):
    """The programme as the paper has it: one table for every latency there is as the bound, in plain loops."""
    n, best = len(times), math.inf
    for bound in sorted({float(t) for t in times.ravel() if math.isfinite(t)}):
        least = [0.0] + [math.inf] * n
        for end in range(1, n + 1):
            for start in range(end):
                if times[start, end - 1 - start] <= bound:
                    least[end] = min(least[end], least[start] + times[start, end - 1 - start])
        best = min(best, least[n] + weight * bound)
    return best


@settings(deadline=None, max_examples=60)
@given(st.integers(8, 16), st.sampled_from([0.25, 1.0, 2.0, 4.0, 8.0]), st.randoms(use_true_random=False))
def test_best_cut_is_the_optimum_among_many_close_latencies(n, weight, random):
    times = np.full((n, n), np.inf)
    for start in range(n):
        for count in range(1, n - start + 1):
            times[start, count - 1] = 1 + count * (1 + random.random() / 4)
    cut = best_cut(times, weight)
    assert cut.total + weight * cut.slowest == pytest.approx(naive_optimum(times, weight), rel=1e-12)


@settings(deadline=None, max_examples=80)
@given(tables(most=8), st.integers(1, 8))
def test_even_cuts_have_the_least_squares_for_each_number(times, most):
    found = even_cuts(times, most)
    for count in range(1, most + 1):
        costs = [of_cut(times, c) for c in compositions(len(times)) if len(c) == count]
        finite = [sum(t * t for t in cost) for cost in costs if all(map(math.isfinite, cost))]
        assert (count in found) == bool(finite)
        if finite:
            assert len(found[count]) == count
            assert abs(above_the_evenest(times, found[count])) <= ROUNDED


def above_the_evenest(times, counts):
    """By how much of the least sum of squares of all cuts into so many slices this one's is above it."""
    costs = [of_cut(times, c) for c in compositions(len(times)) if len(c) == len(counts)]
    least = min(sum(t * t for t in cost) for cost in costs)
    return sum(t * t for t in of_cut(times, counts)) / least - 1


def cuts_off_by(mutant):
    """The largest of these two for tables of random times under a mutant, in tolerances; for ``tests.mutants``."""
    tables = [finite_times(np.random.default_rng(seed), 8) for seed in range(20)]
    with applied(mutant):
        best = [(times, weight, best_cut(times, weight)) for times in tables for weight in (0.5, 3.0)]
        even = [(times, counts) for times in tables for counts in even_cuts(times, 4).values()]
    return max(
        max(above_the_best(*one) for one in best) / EXACT, max(above_the_evenest(*one) for one in even) / ROUNDED
    )


def finite_times(random, n):
    """Times that grow with the length, and with what is before it, by chance more or less."""
    times = np.full((n, n), np.inf)
    for start in range(n):
        for count in range(1, n - start + 1):
            times[start, count - 1] = 1 + count * (1 + start / n) * (0.8 + 0.4 * random.random())
    return times


@settings(deadline=None, max_examples=60)
@given(st.lists(tables(most=3), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 6))
def test_groups_of_sequences_are_the_best_of_all(drawn, sequences, stages):
    times = dict(enumerate(drawn, start=1))
    found = group_sequences(times, sequences, stages)
    assert sum(size for size, _ in found.groups) == sequences
    best = math.inf
    for sizes in compositions(sequences):
        if max(sizes) > len(drawn) or list(sizes) != sorted(sizes):
            continue
        for cuts in itertools.product(*(list(compositions(len(times[size]))) for size in sizes)):  # 1024 at the most
            t = [x for size, counts in zip(sizes, cuts, strict=True) for x in of_cut(times[size], counts)]
            if math.isfinite(sum(t)):
                best = min(best, sum(t) + (stages - 1) * max(t))
    assert found.seconds == pytest.approx(best, rel=1e-9)


def test_groups_that_cannot_add_up_are_an_error():
    with pytest.raises(ConfigError, match=r"sequences: got 3, must be a sum of group sizes \[2\]"):
        group_sequences({2: np.ones((1, 1))}, 3, 2)


def test_times_are_those_of_the_slowest_stage():
    cost = ExampleCost([1.0, 1.0, 3.0, 2.0])
    times = slice_times(cost, 4, Cuts.of(100, granularity=8, min_length=16))
    # 12 quanta of 8, the last one with the 4 tokens that remain
    assert times.shape == (12, 12)
    assert times[0, 1] == pytest.approx(cost.forward(2, 16, 0) + cost.backward(2, 16, 0))
    assert times[3, 8] == pytest.approx(3 * cost.forward(2, 76, 24))
    assert np.isinf(times[0, 0])
    assert np.isinf(times[3, 9])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_lengths_keep_the_rules(total, granularity, least, multiple):
    total = max(total, least) * multiple
    cuts = Cuts.of(total, granularity, least, multiple)
    times = slice_times(ExampleCost([1.0]), 1, cuts)
    lengths = cuts.lengths(best_cut(times, 20.0).counts)
    assert sum(lengths) == total
    assert all(length % granularity == 0 for length in lengths[:-1])
    assert all(length % multiple == 0 for length in lengths)
    assert min(lengths) >= least


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"granularity": 0}, "granularity: got 0, must be a positive number of tokens"),
        ({"min_length": 101}, "sequence length: got 100, must be at least the shortest slice, 101 tokens"),
        ({"multiple_of": 8}, "sequence length: got 100, must be a multiple of 8, which slices must be, use e.g. 104"),
    ],
)
def test_rules_that_cannot_be_kept_are_errors(values, says):
    with pytest.raises(ConfigError, match=says):
        Cuts.of(100, **values)
