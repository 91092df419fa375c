"""Layers over stages, against all partitions and against DeepSpeed's own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan import gain, partition
from ds_terapipe.plan.stages import describe, even_layers, read_layers

layers = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def _all(costs, stages):
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        bounds = (0, *cuts, len(costs))
        yield [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


@settings(deadline=None)
@given(layers, st.data())
def test_the_slowest_stage_is_the_least_there_is(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, stages)
    assert len(found.layers) == stages
    assert min(found.layers) >= 1
    assert sum(found.layers) == len(costs)
    best = min(_all(costs, stages), key=lambda sums: (max(sums), sum(s * s for s in sums)))
    assert found.slowest == pytest.approx(max(best))
    assert sum(s * s for s in found.seconds) == pytest.approx(sum(s * s for s in best))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=24), st.data())
def test_it_is_never_worse_than_deepspeeds_partition(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    assert partition(costs, stages).slowest <= _deepspeed(costs, stages)
    equal = [3] * len(costs)
    assert partition(equal, stages).slowest == _deepspeed(equal, stages)


def test_deepspeeds_partition_is_not_always_the_best():
    # DeepSpeed 0.19.8 minimises the difference between the slowest and the fastest stage.
    costs = [40, 1, 12, 13, 30, 1, 10]
    assert (partition(costs, 4).slowest, _deepspeed(costs, 4)) == (40, 41)


def _deepspeed(costs, stages):
    partition_balanced = pytest.importorskip("deepspeed.runtime.utils").partition_balanced
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(partition_balanced(costs, stages)))


def test_it_prints_what_a_command_line_takes():
    found = partition([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0], 2)
    assert found.text == "5,3"
    assert found.boundaries == (0, 5, 8)
    assert found.seconds == (5.0, 5.0)


def test_what_it_prints_is_read_again():
    found = partition([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0], 2)
    assert read_layers(found.text, 8, 2) == read_layers(" 5, 3", 8) == found.layers


@pytest.mark.parametrize(
    ("text", "stages", "use"),
    [
        ("5,2", 2, "4,4"), ("5,2", None, "4,4"), ("8", 2, "4,4"), ("9,-1", None, "4,4"), ("8,0", 2, "4,4"),
        ("4,4", 3, "3,3,2"), ("4;4", 2, "4,4"), ("", None, "8"), ("1," * 8 + "1", 9, "1,1,1,1,1,1,1,1"),
    ],
)  # fmt: skip
def test_other_texts_are_one_line_that_says_what_to_use(text, stages, use):
    with pytest.raises(ConfigError, match=f"--stage-layers: got .*, 8 together, use e.g. {use}$"):
        read_layers(text, 8, stages)


def test_even_layers_are_even():
    assert even_layers(8, 3) == (3, 3, 2)


def test_gain_is_the_share_of_the_slowest_stages_time():
    costs = [1.0, 1.0, 1.0, 1.0, 4.0]
    assert gain(costs, [3, 2]) == pytest.approx(1 - 4 / 5)
    assert gain(costs, [4, 1]) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: partition([1.0, 2.0], 3), "stages: got 3, must be from 1 to the number of layers, 2"),
        (lambda: partition([1.0, float("nan")], 1), "layer 1: got nan s, must be a time"),
        (lambda: describe([1.0] * 4, [3, 2]), r"stage layers: got \[3, 2\], .*4 together, use e.g. 2,2"),
        (lambda: describe([1.0] * 4, [4, 0]), "one layer or more per stage"),
    ],
)
def test_what_cannot_be_divided_is_an_error(call, says):
    with pytest.raises(ConfigError, match=says):
        call()
