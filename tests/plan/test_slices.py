"""The cuts of a sequence, and layers over stages, against all that there are; advice from times of single layers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.slices import Cuts, best_cut, even_cuts, slice_times
from ds_terapipe.plan.stages import WORTH, LayerSeconds, even_layers, gain, partition, read_layers
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


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 40))
def test_lengths_keep_the_rules(total, granularity, least):
    total = max(total, least)
    cuts = Cuts(total, granularity, least)
    lengths = cuts.lengths(best_cut(slice_times(ExampleCost([1.0]), 1, cuts), 20.0).counts)
    assert sum(lengths) == total and min(lengths) >= least
    assert all(length % granularity == 0 for length in lengths[:-1])


def sums(costs, bounds):
    return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9))
@example([1, 3, 7, 9, 3], 3)  # the least sum of squares has a slower stage
def test_the_slowest_stage_is_the_least_there_is(costs, stages):
    stages = min(stages, len(costs))
    found = partition(costs, stages)
    assert len(found.layers) == stages and min(found.layers) >= 1 and sum(found.layers) == len(costs)
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = (sums(costs, (0, *cut, len(costs))) for cut in cuts)
    best = min(every, key=lambda seconds: (max(seconds), sum(s * s for s in seconds)))
    assert found.slowest == pytest.approx(max(best))
    assert sum(s * s for s in found.seconds) == pytest.approx(sum(s * s for s in best))


def test_a_partition_prints_what_a_command_line_takes():
    found = partition([1.0] * 7 + [3.0], 2)
    assert (found.text, found.boundaries, found.seconds) == ("5,3", (0, 5, 8), (5.0, 5.0))
    assert read_layers(found.text, 8, 2) == read_layers(" 5, 3", 8) == found.layers
    assert even_layers(8, 3) == (3, 3, 2)
    costs = [1.0, 1.0, 1.0, 1.0, 4.0]
    assert gain(costs, [3, 2]) == pytest.approx(1 - 4 / 5) and gain(costs, [4, 1]) == 0


@pytest.mark.parametrize(("text", "stages", "use"), [("5,2", 2, "4,4"), ("9,-1", None, "4,4"), ("4,4", 3, "3,3,2")])
def test_other_texts_are_one_line_that_says_what_to_use(text, stages, use):
    with pytest.raises(ConfigError, match=f"--stage-layers: got .*, 8 together, use e.g. {use}$"):
        read_layers(text, 8, stages)


ADVICE = [
    # an own module
    (((1.0, 2.0, 3.0), (1.0, 0.5, 0.5)), (0, 0), "2,4 layers would take 16.7% less than 3,3 in the slowest stage: begin the "
     "stages of the PipelineModule at its layers 0, 2 in place of 0, 3"),
    # embedding 1, norm and head 3 stay with their neighbours and do not count
    (((1.0, 2.0), (2.0, 2.0, 2.0, 1.0, 2.0)), (1, 2), "2,2 layers would take 22.2% less than 1,3 in the slowest stage: build the "
     "pipeline with layers_per_stage=[2, 2], in train.py --stage-layers 2,2"),
    # as good as any: 3,1 takes 7 as well
    (((1.0, 2.0, 2.0), (2.0, 2.0, 1.0, 2.0)), (1, 2), ""),
    # worth a line from three per cent on
    (((1 - 0.99 * WORTH, 0.99 * WORTH), (0.1,)), (0, 0), ""),
    (((1 - 1.01 * WORTH, 1.01 * WORTH), (0.1,)), (0, 0), "1,2 layers would take 3.0% less than 2,1 in the slowest stage: begin "
     "the stages of the PipelineModule at its layers 0, 1 in place of 0, 2"),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "ends", "says"), ADVICE)
def test_other_stages_are_advised_by_the_times_of_layers(stages, ends, says):
    assert LayerSeconds(stages, ends).advice() == says
