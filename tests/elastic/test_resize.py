"""Which shape at which step, what a shape makes of the batch, and what is refused at the beginning."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.elastic.policies.freeze import ModelLayers
from ds_terapipe.elastic.policies.resize import Shape, balanced, check, shape_of, shapes, wanted_stages
from ds_terapipe.elastic.settings import ResizeSettings, parse
from ds_terapipe.errors import ConfigError


def wanted(policy, step=0, present=4, start=4, sizes=(1,) * 8, frozen=0):
    return wanted_stages(ResizeSettings(policy=policy), step, present, start, sizes, frozen)


# ------------------------------------------------------------------------------------------------------------ wanted stages


def test_off_stays():
    assert wanted("off", step=100, present=4, frozen=7) == 4


def test_a_listed_step_holds_from_that_step_on():
    pairs = [[3, 2], [5, 1], [9, 4]]
    assert [wanted(pairs, step=step) for step in range(11)] == [4, 4, 4, 2, 2, 1, 1, 1, 1, 4, 4]
    assert wanted(pairs, step=2, present=3) == 3 and wanted([[0, 2]]) == 2


def test_halve_by_the_compression_test():
    sizes = [6, 1, 1, 1, 1, 1, 1, 2]  # on four stages, the largest has 6: the embedding
    assert [wanted("halve", sizes=sizes, frozen=frozen) for frozen in range(8)] == [4, 2, 2, 1, 1, 1, 1, 1]
    assert wanted("halve", sizes=(9, 1, 1, 1, 1, 1, 1, 2)) == 4  # two stages would be no larger, but nothing is frozen
    # a quarter of even layers each: half the stages when half is frozen, one when three quarters are
    assert [wanted("halve", frozen=frozen) for frozen in range(8)] == [4, 4, 4, 4, 2, 2, 1, 1]


def test_halve_compares_with_the_start_and_never_grows():
    assert wanted("halve", present=2, start=4, frozen=4) == 2
    assert wanted("halve", present=2, start=2, frozen=0) == 2
    assert wanted("halve", present=1, start=4, frozen=0) == 1
    assert wanted("halve", present=2, start=4, frozen=6) == 1


def test_halve_stops_at_an_odd_number():
    assert wanted("halve", present=6, start=6, sizes=(1,) * 6, frozen=5) == 3


@given(st.lists(st.integers(0, 9), min_size=4, max_size=9), st.sampled_from([1, 2, 3, 4]), st.data())
def test_halving_keeps_every_stage_as_small_as_the_largest_was(sizes, start, data):
    frozen = data.draw(st.integers(1, len(sizes) - 1))
    found = wanted("halve", present=start, start=start, sizes=sizes, frozen=frozen)
    limit = smallest_maximum(sizes, start)
    left = [0] * frozen + sizes[frozen:]
    assert start % found == 0 and smallest_maximum(left, found) <= limit
    assert found % 2 or smallest_maximum(left, found // 2) > limit
    more = data.draw(st.integers(frozen, len(sizes) - 1))
    assert wanted("halve", present=start, start=start, sizes=sizes, frozen=more) <= found


def smallest_maximum(sizes, stages):
    cuts = itertools.combinations(range(1, len(sizes)), stages - 1)
    return min(max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cut, len(sizes)))) for cut in cuts)


# ------------------------------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    ("stages", "processes", "tensor", "batch", "micro", "shape"),
    [
        (4, 4, 1, 8, 2, Shape(4, 1, 2, 4)),
        (2, 4, 1, 8, 2, Shape(2, 2, 2, 2)),
        (1, 4, 1, 8, 2, Shape(1, 4, 2, 1)),
        (1, 4, 1, 4, 2, Shape(1, 4, 1, 1)),
        (1, 4, 2, 12, 4, Shape(1, 2, 3, 2)),  # 6 samples for each: 3 is the largest divisor below 4
        (2, 8, 2, 14, 5, Shape(2, 2, 1, 7)),
        (3, 3, 1, 6, 9, Shape(3, 1, 6, 1)),
    ],
)
def test_shapes(stages, processes, tensor, batch, micro, shape):
    assert shape_of(stages, processes, tensor, batch, micro) == shape


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 2), st.integers(1, 12), st.integers(1, 8))
def test_the_batch_stays_and_the_micro_batch_where_it_can(stages, replicas, tensor, share, micro):
    batch = share * replicas
    shape = shape_of(stages, stages * replicas * tensor, tensor, batch, micro)
    assert (shape.stages, shape.replicas) == (stages, replicas)
    assert shape.replicas * shape.micro_batch * shape.micro_batches == batch
    fits = [size for size in range(1, micro + 1) if batch % (replicas * size) == 0]
    assert shape.micro_batch == fits[-1]
    assert batch % (replicas * micro) or shape.micro_batch == micro


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (3, 4, 1, 8, 1),
            "elastic_pipeline.resize.policy: got 3, must be a number of stages that divides the 4 processes, use 1 or 2 or 4",
        ),
        (
            (4, 4, 2, 8, 1),
            "elastic_pipeline.resize.policy: got 4, must be a number of stages that times the tensor-parallel size (2) "
            "divides the 4 processes, use 1 or 2",
        ),
        (
            (1, 4, 1, 6, 1),
            "elastic_pipeline.resize.policy: got 1, must be a number of stages whose replicas, here 4, divide the batch "
            "of 6 samples, use 2 or 4",
        ),
    ],
)
def test_shapes_that_leave_something_over(args, message):
    with pytest.raises(ConfigError) as caught:
        shape_of(*args)
    assert str(caught.value) == message


def test_every_phase_s_batch_is_divided():
    assert [shape.stages for shape in shapes(4, 1, 8, 1)] == [1, 2, 4]
    assert [shape.stages for shape in shapes(4, 1, 8, 1, (6,))] == [2, 4]
    block = {"resize": {"policy": [[1, 2]]}}
    checked(block, batches=((8, 1), (6, 2)))
    with pytest.raises(ConfigError) as caught:
        checked(block, batches=((8, 1), (6, 2), (3, 1)))
    assert str(caught.value) == (
        "elastic_pipeline.resize.policy: got 2, must be a number of stages whose replicas, here 2, divide the batch of 3 "
        "samples, use 4"
    )


# ----------------------------------------------------------------------------------------------------------------- balance


def test_frozen_entries_cost_their_forward_only():
    forward, backward = [1.0] * 8, [2.0] * 8
    assert balanced(forward, backward, 0, 2) == (0, 4, 8)
    assert balanced(forward, backward, 4, 2) == (0, 5, 8)  # 4 + 3 and 9, not 4 and 12
    assert balanced(forward, backward, 7, 2) == (0, 5, 8)
    assert balanced(forward, backward, 3, 1) == (0, 8)


@given(st.data(), st.integers(1, 7))
def test_balanced_is_the_best_there_is(data, entries):
    costs = st.lists(st.integers(0, 9), min_size=entries, max_size=entries)
    forward, backward = data.draw(costs), data.draw(costs)
    frozen, stages = data.draw(st.integers(0, entries)), data.draw(st.integers(1, entries))
    total = [f + (b if index >= frozen else 0) for index, (f, b) in enumerate(zip(forward, backward, strict=True))]
    parts = balanced(forward, backward, frozen, stages)
    assert parts[0] == 0 and parts[-1] == entries and len(parts) == stages + 1
    assert all(a < b for a, b in itertools.pairwise(parts))
    assert max(sum(total[a:b]) for a, b in itertools.pairwise(parts)) == smallest_maximum(total, stages)


def test_parts_stay_where_others_would_gain_little():
    forward = [1.0] * 6
    assert balanced(forward, [2.0] * 6, 0, 2, present=(0, 3, 6)) == (0, 3, 6)
    assert balanced(forward, [2.0] * 6, 3, 2, present=(0, 3, 6)) == (0, 4, 6)  # 6 and 6, not 3 and 9
    costs = [1.0, 1.0, 1.0, 1.0, 1.04, 1.0]
    assert balanced(costs, [0.0] * 6, 0, 2, present=(0, 4, 6)) == (0, 3, 6)
    assert balanced([1.0, 1.04, 1.0], [0.0] * 3, 0, 2, present=(0, 1, 3)) == (0, 1, 3)
    assert balanced([1.0, 0.9, 0.98], [0.0] * 3, 0, 2, present=(0, 2, 3)) == (0, 2, 3)  # 1.88 instead of 1.9


def test_more_stages_than_entries():
    with pytest.raises(
        ConfigError, match=r"resize.policy: got 3, must be at most the entries of the layer list, 2, use 2"
    ):
        balanced([1.0] * 2, [1.0] * 2, 0, 3)


# ------------------------------------------------------------------------------------------------------------------- check


def checked(block, trainable=(True,) * 6, stages=4, processes=4, tensor=1, batch=8, micro=1, data=True, batches=()):
    settings = parse({"elastic_pipeline": block})
    check(settings, ModelLayers(trainable), stages, processes, tensor, batch, micro, data, batches)


@pytest.mark.parametrize(
    ("block", "given"),
    [
        ({}, {"data": False}),
        ({"resize": {"policy": "off"}}, {"stages": 3, "processes": 3, "batch": 3}),
        ({"freeze": {"policy": "schedule", "frozen_layers": [[1, 2], [9, 5]]}}, {"data": False}),
        ({"freeze": {"policy": "alpha", "interval": 3}}, {"data": False}),
        ({"freeze": {"policy": "grad_norm"}}, {}),
        ({"resize": {"policy": "halve"}}, {"batch": 12}),
        ({"resize": {"policy": "halve"}}, {"stages": 6, "processes": 6, "batch": 2}),  # 3, and no further
        ({"resize": {"policy": [[1, 2], [3, 1]]}}, {"micro": 4}),
    ],
)
def test_what_can_run(block, given):
    checked(block, **given)


SCHEDULE = {"policy": "schedule", "frozen_layers": [[1, 2], [9, 5]]}


@pytest.mark.parametrize(
    ("block", "given", "message"),
    [
        (
            {"freeze": SCHEDULE},
            {"trainable": (True,) * 5},
            "elastic_pipeline.freeze.frozen_layers: got 5, must be at most 4 entries (the head, the last entry with trained "
            "parameters, is never frozen), use at most 4",
        ),
        ({"freeze": SCHEDULE}, {"trainable": (True, True, True, True, True, False)}, "got 5, must be at most 4 entries"),
        ({"freeze": SCHEDULE}, {"trainable": (True, False)}, 'got 2, must be at most 0 entries (the head, the last entry with '
         'trained parameters, is never frozen), use "policy": "static"'),
        (
            {"freeze": {"policy": "alpha"}},
            {"data": False},
            'elastic_pipeline.freeze.interval: got "epoch", must be a number of steps where there is no training_data, '
            'use e.g. "interval": 1000',
        ),
        ({"resize": {"policy": [[1, 2], [2, 3]]}}, {}, "got 3, must be a number of stages that divides the 4 processes"),
        ({"resize": {"policy": [[1, 1]]}}, {"batch": 6}, "replicas, here 4, divide the batch of 6 samples, use 2 or 4"),
        ({"resize": {"policy": [[5, 8]]}}, {"processes": 8}, "got 8, must be at most the entries of the layer list, 6"),
        ({"resize": {"policy": "halve"}}, {"batch": 2}, "got 1, must be a number of stages whose replicas, here 4,"),
    ],
)  # fmt: skip
def test_what_cannot(block, given, message):
    with pytest.raises(ConfigError) as caught:
        checked(block, **given)
    assert message in str(caught.value) and "\n" not in str(caught.value)
