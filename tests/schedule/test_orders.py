from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    NAMES,
    Action,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    Unit,
    forward_only,
    order,
    peak_live_units,
    register,
    schedule_named,
    stream_deadlock,
    validate,
    with_messages,
)

from . import strategies

# Written out by hand from the definitions, warm-up first.
GOLDEN = {
    ("terapipe", 2, (3,)): [
        "0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0B0.0",
        "1F0.0 1F0.1 1F0.2 1B0.2 1B0.1 1B0.0",
    ],
    ("1f1b", 2, (3,)): [
        "0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0B0.0",
        "1F0.0 1F0.1 1F0.2 1B0.2 1B0.1 1B0.0",
    ],
    ("terapipe", 3, (2, 2)): [
        "0F0.0 0F0.1 0F1.0 0F1.1 0B1.1 0B1.0 0B0.1 0B0.0",
        "1F0.0 1F0.1 1F1.0 1F1.1 1B1.1 1B1.0 1B0.1 1B0.0",
        "2F0.0 2F0.1 2F1.0 2F1.1 2B1.1 2B1.0 2B0.1 2B0.0",
    ],
    ("1f1b", 3, (2, 2)): [
        "0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0B0.0 0B1.1 0B1.0",
        "1F0.0 1F0.1 1F1.0 1B0.1 1F1.1 1B0.0 1B1.1 1B1.0",
        "2F0.0 2F0.1 2B0.1 2F1.0 2B0.0 2F1.1 2B1.1 2B1.0",
    ],
    ("1f1b", 2, (1, 3, 2)): [
        "0F0.0 0F1.0 0F1.1 0F1.2 0B0.0 0F2.0 0B1.2 0F2.1 0B1.1 0B1.0 0B2.1 0B2.0",
        "1F0.0 1F1.0 1F1.1 1B0.0 1F1.2 1B1.2 1F2.0 1B1.1 1F2.1 1B1.0 1B2.1 1B2.0",
    ],
    ("1f1b", 2, (1, 1, 1)): [
        "0F0.0 0F1.0 0B0.0 0F2.0 0B1.0 0B2.0",
        "1F0.0 1B0.0 1F1.0 1B1.0 1F2.0 1B2.0",
    ],
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_orders(case):
    name, stages, slices = case
    assert [" ".join(map(str, row)) for row in order(name, stages, slices)] == GOLDEN[case]


def test_golden_evaluation():
    rows = [" ".join(map(str, row)) for row in forward_only(2, [2, 1])]
    assert rows == ["0F0.0 0F0.1 0F1.0", "1F0.0 1F0.1 1F1.0"]


@given(strategies.names, strategies.stages, strategies.slices)
def test_every_order_is_valid(name, stages, slices):
    grid = order(name, stages, slices)
    validate(grid, slices, name)
    validate(with_messages(grid), slices, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_even_order_is_valid(name):
    for stages, micro_batches, each in itertools.product(range(1, 9), repeat=3):
        slices = [each] * micro_batches
        validate(with_messages(order(name, stages, slices)), slices, name)


@given(strategies.stages, strategies.slices)
def test_every_evaluation_is_valid(stages, slices):
    validate(with_messages(forward_only(stages, slices)), slices, "forward_only")


def _live_units(row):
    live, counts = 0, []
    for action in row:
        live += {Op.FORWARD: 1, Op.BACKWARD: -1}[action.op]
        counts.append(live)
    return counts


@given(strategies.stages, strategies.slices)
def test_1f1b_holds_units_of_stages_and_slices_not_of_the_batch(stages, slices):
    peaks = [max(_live_units(row)) for row in order("1f1b", stages, slices)]
    assert all(peak <= stages - stage + max(slices) - 1 for stage, peak in enumerate(peaks))
    assert max(peaks) <= stages + max(slices) - 1
    assert peaks == peak_live_units("1f1b", stages, slices)


@pytest.mark.parametrize("micro_batches", [8, 100])
def test_the_bound_of_1f1b_is_reached_and_the_batch_does_not_move_it(micro_batches):
    assert peak_live_units("1f1b", 4, [3] * micro_batches) == [6, 5, 4, 3]
    assert max(_live_units(order("1f1b", 4, [3] * micro_batches)[0])) == 4 + 3 - 1


@given(strategies.stages, strategies.slices)
def test_terapipe_goes_backward_in_exact_reverse_and_holds_the_batch(stages, slices):
    for row in order("terapipe", stages, slices):
        units = [action.unit for action in row]
        assert units == units[::-1]
        assert max(_live_units(row)) == sum(slices)
    assert peak_live_units("terapipe", stages, slices) == [sum(slices)] * stages


@given(strategies.stages, strategies.slices)
def test_1f1b_is_fifo_over_micro_batches_and_lifo_over_slices(stages, slices):
    for row in order("1f1b", stages, slices):
        backward = [action.unit for action in row if action.op is Op.BACKWARD]
        assert backward == sorted(backward, key=lambda unit: (unit.micro_batch, -unit.slice))


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 4), (2, 1), (2, 6), (3, 5), (4, 2), (4, 9), (8, 8)])
def test_one_slice_is_deepspeeds_1f1b(stages, micro_batches):
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")

    def deepspeed_order(stage):
        # A buffer serves one micro-batch at a time, and both directions are first in first out, so counting tells the
        # unit.
        train = schedule.TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
        commands = [type(command) for step in train.steps() for command in step]
        seen = {schedule.ForwardPass: 0, schedule.BackwardPass: 0}
        for command in commands:
            if command in seen:
                yield f"{stage}{'F' if command is schedule.ForwardPass else 'B'}{seen[command]}.0"
                seen[command] += 1

    for stage, row in enumerate(order("1f1b", stages, [1] * micro_batches)):
        assert list(map(str, row)) == list(deepspeed_order(stage))


# By hand: segments as if each had a place of its own, one computation a time step; at one time backward first, later segments
# first.
PLACED = {
    ("1f1b", (0, 0, 1, 1), 0, (2,)): [
        "0F0.0 1F0.0 0F0.1 1F0.1 1B0.1 0B0.1 1B0.0 0B0.0",
        "2F0.0 3F0.0 2F0.1 3F0.1 3B0.1 2B0.1 3B0.0 2B0.0",
    ],
    ("1f1b", (0, 1, 1, 0), 0, (1, 1)): [
        "0F0.0 0F1.0 3F0.0 3B0.0 3F1.0 3B1.0 0B0.0 0B1.0",
        "1F0.0 2F0.0 1F1.0 2F1.0 2B0.0 1B0.0 2B1.0 1B1.0",
    ],
    ("1f1b", (0, 1, 1, 0), 2, (1, 1)): [
        "0F0.0 0F1.0 3F0.0 3B0.0 3F1.0 3B1.0",
        "1F0.0 2F0.0 1F1.0 2F1.0 2B0.0 2B1.0",
    ],
    ("terapipe", (0, 1, 0, 1), 1, (2,)): [
        "0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0",
        "1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0",
    ],
}


def test_of_what_starts_together_backward_comes_first():
    row = order("1f1b", Placement.of([0, 1, 2, 0]), [1] * 5)[0]
    assert " ".join(map(str, row)).startswith(
        "0F0.0 0F1.0 0F2.0 3F0.0 0F3.0 3B0.0 3F1.0 3B1.0 0B0.0 3F2.0 3B2.0 0F4.0"  # at 0 1 2 3 3 4 5 6 7 7 8 8
    )


@pytest.mark.parametrize("case", PLACED, ids=str)
def test_golden_orders_of_places(case):
    name, places, frozen, slices = case
    rows = order(name, Placement.of(places, forward_only=frozen), slices)
    assert [" ".join(map(str, row)) for row in rows] == PLACED[case]


def test_golden_evaluation_of_places():
    rows = [" ".join(map(str, row)) for row in forward_only(Placement.of([0, 1, 0]), [2, 2])]
    assert rows == ["0F0.0 0F0.1 2F0.0 0F1.0 2F0.1 0F1.1 2F1.0 2F1.1", "1F0.0 1F0.1 1F1.0 1F1.1"]


@settings(deadline=None)
@given(strategies.names, strategies.placements(), strategies.few_slices)
def test_every_order_is_valid_on_every_placement(name, placement, slices):
    grid = order(name, placement, slices)
    validate(grid, slices, name, placement)
    lowered = with_messages(grid, placement)
    validate(lowered, slices, name, placement)
    for stage in range(len(placement.stages)):
        ran = [action for action in grid[placement.place_of(stage)] if action.stage == stage]
        assert sum(action.op is Op.BACKWARD for action in ran) == sum(slices) * placement.goes_backward(stage)
    # pacing, not the room for messages, is why: the least room would do
    assert not stream_deadlock(lowered, posted_ahead=1, sent_kept=0, placement=placement)
    evaluation = with_messages(forward_only(placement, slices), placement)
    validate(evaluation, slices, "forward_only", placement)
    assert not stream_deadlock(evaluation, posted_ahead=1, sent_kept=0, placement=placement)


@given(strategies.names, strategies.stages, strategies.slices, st.data())
def test_frozen_stages_only_lose_their_backward_passes(name, stages, slices, data):
    frozen = data.draw(st.integers(0, stages - 1))
    rows = order(name, Placement.plain(stages, forward_only=frozen), slices)
    whole = order(name, stages, slices)
    assert rows == [[a for a in row if a.op is Op.FORWARD or a.stage >= frozen] for row in whole]
    assert peak_live_units(name, Placement.plain(stages, forward_only=frozen), slices) == [
        0 if stage < frozen else peak for stage, peak in enumerate(peak_live_units(name, stages, slices))
    ]


@settings(deadline=None)
@given(strategies.names, strategies.placements(), strategies.few_slices)
def test_live_units_of_a_place_are_bounded_and_one_segment_reaches_the_bound(name, placement, slices):
    bounds = peak_live_units(name, placement, slices)
    for place, row in enumerate(order(name, placement, slices)):
        peak = max(_live_units([action for action in row if placement.goes_backward(action.stage)]), default=0)
        assert peak <= bounds[place]
        stages = placement.stages_on(place)
        if stages[-1] - stages[0] == len(stages) - 1:
            assert peak == bounds[place]


def test_unknown_name_lists_the_valid_ones():
    for function in (order, peak_live_units):
        with pytest.raises(ValueError, match=r"^schedule: got 'gpipe', must be one of ('\w+', )+'\w+'$") as raised:
            function("gpipe", 2, [1])
        assert all(repr(name) in str(raised.value) for name in (*NAMES, "interleaved", "forward_only"))


def test_a_schedule_of_ones_own_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr("ds_terapipe.schedule.orders.registry._SCHEDULES", {})

    def one_by_one(placement, slices):
        """A unit's whole way there and back before the next unit starts; of unsliced micro-batches."""
        there = [
            [Action(Op.FORWARD, stage, Unit(m, 0)) for m in range(len(slices))] for stage in range(placement.places)
        ]
        return [[each for action in row for each in (action, action._replace(op=Op.BACKWARD))] for row in there]

    made = register(Schedule("one-by-one", one_by_one, lambda placement, slices: [1] * placement.places))
    assert schedule_named("one-by-one") is made
    validate(order("one-by-one", 3, [1, 1]), [1, 1], "one-by-one")
    with pytest.raises(ScheduleError, match="stage 0 holds 2 live units, 'one-by-one' holds 1 at most"):
        validate([[Action.from_text(text) for text in ("0F0.0", "0F1.0", "0B0.0", "0B1.0")]], [1, 1], "one-by-one")
    with pytest.raises(ValueError, match="'one-by-one' a second time"):
        register(made)


def test_training_needs_a_stage_that_goes_backward():
    frozen = Placement.plain(2, forward_only=2)
    for function in (order, peak_live_units):
        with pytest.raises(ValueError, match="forward_only: got all 2 stages, must be fewer to train with '1f1b'"):
            function("1f1b", frozen, [1])
    validate(forward_only(frozen, [2]), [2], "forward_only", frozen)
    assert peak_live_units("forward_only", frozen, [2]) == [0, 0]


@pytest.mark.parametrize(
    ("stages", "slices", "message"),
    [(0, [1], "stages: got 0"), (2, [], "slices"), (2, [3, 0], r"slices: got \[3, 0\]")],
)
def test_bad_sizes_are_refused(stages, slices, message):
    with pytest.raises(ValueError, match=message):
        order("1f1b", stages, slices)
    with pytest.raises(ValueError, match=message):
        forward_only(stages, slices)
