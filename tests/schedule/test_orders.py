"""The orders: TeraPipe's, slice-level 1F1B and interleaved 1F1B, on any placement."""

import collections
import itertools
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.config import parse
from ds_terapipe.schedule import (
    NAMES,
    Action,
    Op,
    Placement,
    Schedule,
    ScheduleError,
    Unit,
    hardware_queue,
    replay,
    simulate,
    validate,
)
from ds_terapipe.schedule.fill import fill
from ds_terapipe.schedule.hardware_queue import queue_deadlock
from ds_terapipe.schedule.lower import covered_slices, with_messages, with_weight_gradients
from ds_terapipe.schedule.orders import forward_only, names_on, order, peak_live_units, register, schedule_named
from tests.schedule import strategies
from tests.schedule.strategies import grid_of, rows_of

# Written out by hand from the definitions, warm-up first. Segments of a place are as if each had a place of its own, one
# computation a time step; at one time backward first, later segments first. (schedule, places, forward-only stages, slices)
GOLDEN = {
    ("terapipe", (0, 1), 0, (3,)): ["0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0B0.0", "1F0.0 1F0.1 1F0.2 1B0.2 1B0.1 1B0.0"],
    ("1f1b", (0, 1, 2), 0, (2, 2)): [
        "0F0.0 0F0.1 0F1.0 0F1.1 0B0.1 0B0.0 0B1.1 0B1.0",
        "1F0.0 1F0.1 1F1.0 1B0.1 1F1.1 1B0.0 1B1.1 1B1.0",
        "2F0.0 2F0.1 2B0.1 2F1.0 2B0.0 2F1.1 2B1.1 2B1.0",
    ],
    ("1f1b", (0, 1), 0, (1, 3, 2)): [
        "0F0.0 0F1.0 0F1.1 0F1.2 0B0.0 0F2.0 0B1.2 0F2.1 0B1.1 0B1.0 0B2.1 0B2.0",
        "1F0.0 1F1.0 1F1.1 1B0.0 1F1.2 1B1.2 1F2.0 1B1.1 1F2.1 1B1.0 1B2.1 1B2.0",
    ],
    ("1f1b", (0, 0, 1, 1), 0, (2,)): [
        "0F0.0 1F0.0 0F0.1 1F0.1 1B0.1 0B0.1 1B0.0 0B0.0",
        "2F0.0 3F0.0 2F0.1 3F0.1 3B0.1 2B0.1 3B0.0 2B0.0",
    ],
    ("1f1b", (0, 1, 1, 0), 2, (1, 1)): ["0F0.0 0F1.0 3F0.0 3B0.0 3F1.0 3B1.0", "1F0.0 2F0.0 1F1.0 2F1.0 2B0.0 2B1.0"],
    ("terapipe", (0, 1, 0, 1), 1, (2,)): [
        "0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0",
        "1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0",
    ],
    # stage 1 waits for 0F1.1, stage 0 for 1B1.1, which fit one; 0W0.1 makes room for 0F1.1
    ("zero_bubble", (0, 1), 0, (2, 2)): [
        "0F0.0 0F0.1 0F1.0 0B0.1 0W0.1 0F1.1 0B0.0 0W0.0 0B1.1 0B1.0 0W1.0",
        "1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1W0.1 1F1.1 1B1.1 1B1.0 1W0.0 1W1.0",
    ],
    ("zero_bubble", (0, 1, 0, 1), 0, (2,)): [
        "0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0 0B0.1 0B0.0 2W0.0 0W0.0",
        "1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0 3W0.0 1W0.0",
    ],
    ("interleaved", (0, 1, 0, 1), 0, (3, 1)): [
        "0F0.0 0F0.1 2F0.0 2F0.1 0F0.2 0F1.0 2F0.2 2F1.0 2B0.2 2B0.1 0B0.2 0B0.1 2B0.0 2B1.0 0B0.0 0B1.0",
        "1F0.0 1F0.1 3F0.0 3F0.1 1F0.2 1F1.0 3F0.2 3B0.2 3F1.0 3B0.1 1B0.2 1B0.1 3B0.0 3B1.0 1B0.0 1B1.0",
    ],
    ("forward_only", (0, 1, 0), 0, (2, 2)): ["0F0.0 0F0.1 2F0.0 0F1.0 2F0.1 0F1.1 2F1.0 2F1.1", "1F0.0 1F0.1 1F1.0 1F1.1"],
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_golden_orders(case):
    name, places, frozen, slices = case
    assert rows_of(order(name, Placement.of(places, forward_only=frozen), slices)) == GOLDEN[case]


# places, micro-batches of 8 slices, stages of a place: time / ideal and live slices of all its stages, at most (F = B = W)
FILLED = {
    (2, 1, 1): (1.0834, 8), (4, 2, 1): (1.065, 11), (8, 2, 1): (1.15, 15), (8, 4, 1): (1.075, 15),
    (4, 2, 2): (1.035, 9.5), (8, 2, 2): (1.075, 12), (8, 4, 2): (1.04, 12), (8, 4, 4): (1.02, 9.75),
}  # fmt: skip


@pytest.mark.parametrize("shape", FILLED, ids=str)
def test_weight_gradients_leave_the_bubble_of_the_passes(shape):
    (places, micro_batches, chunks), (time, live) = shape, FILLED[shape]
    placement, slices = Placement.interleaved(places, chunks), [8] * micro_batches
    grid = order("zero_bubble", placement, slices)
    made = {action: len(found) for row in grid for action, found in covered_slices(row, slices).items()}
    found = simulate(grid, lambda action: made.get(action, 1), placement=placement)
    assert found.makespan <= time * 24 * micro_batches * chunks
    assert max(place.peak_units for place in found.places) <= live * chunks


@settings(deadline=None)
@given(st.sampled_from(["1f1b", "terapipe"]), strategies.stages, strategies.few_slices, st.randoms())
def test_filling_moves_no_pass_and_holds_no_more_than_the_fullest_place(name, stages, slices, random):
    times: dict[Action, float] = collections.defaultdict(lambda: random.uniform(0.1, 2))
    placement = Placement.plain(stages)
    passes = order(name, placement, slices)
    grid = fill(passes, placement, times.__getitem__)
    validate(grid, slices, name)
    made = {action: found for row in grid for action, found in covered_slices(row, slices).items()}
    takes = {Op.FORWARD: 2, Op.BACKWARD: -1}
    assert [[a for a in row if a.op in takes] for row in grid] == passes
    most = 2 * max(place.peak_units for place in simulate(passes, times.__getitem__).places)
    for row in grid:
        assert max(itertools.accumulate(takes.get(a.op, -len(made.get(a, ()))) for a in row)) <= most


@settings(deadline=None)
@given(strategies.names, strategies.placements() | strategies.in_turn, strategies.few_or_long)
def test_every_order_is_valid_on_every_placement(name, placement, slices):
    for kind in (name, "forward_only"):
        grid = order(kind, placement, slices)
        validate(grid, slices, kind, placement)
        lowered = with_messages(grid, placement)
        validate(lowered, slices, kind, placement)
        for each in (lowered, with_weight_gradients(lowered, placement)):
            assert not queue_deadlock(each) and not queue_deadlock(each, posted_ahead=0)
        with mock.patch.multiple(hardware_queue, SENT_KEPT=0, EVAL_SENT_KEPT=0):  # pacing is why, not the room for messages
            assert not queue_deadlock(lowered)
        for stage in range(len(placement.stages)):
            back = [a for a in grid[placement.place_of(stage)] if a.stage == stage and a.op is Op.BACKWARD]
            assert len(back) == sum(slices) * placement.goes_backward(stage) * (kind == name)


def live_units(row):
    return list(itertools.accumulate({Op.FORWARD: 1, Op.BACKWARD: -1}[action.op] for action in row))


@given(strategies.stages, strategies.slices)
def test_1f1b_holds_units_of_stages_and_slices_first_in_first_out_over_micro_batches(stages, slices):
    grid, peaks = order("1f1b", stages, slices), peak_live_units("1f1b", stages, slices)
    assert peaks == [max(live_units(row)) for row in grid]
    assert peaks == [min(sum(slices), stages - stage + max(slices) - 1) for stage in range(stages)]
    for row in grid:  # and last in first out over slices
        backward = [action.unit for action in row if action.op is Op.BACKWARD]
        assert backward == sorted(backward, key=lambda unit: (unit.micro_batch, -unit.slice))


def test_training_needs_a_stage_that_goes_backward():
    frozen = Placement.plain(2, forward_only=2)
    for function in (order, peak_live_units):
        with pytest.raises(ValueError, match="forward_only: got all 2 stages, must be fewer to train with '1f1b'"):
            function("1f1b", frozen, [1])
    validate(forward_only(frozen, [2]), [2], "forward_only", frozen)
    assert peak_live_units("forward_only", frozen, [2]) == [0, 0]


@given(st.integers(1, 6), st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 3))
def test_interleaved_runs_every_chunk_of_every_unit_in_the_published_time(places, chunks, slices, frozen):
    slices[-1] += -sum(slices) % places
    whole = Placement.interleaved(places, chunks)
    placement = replace(whole, forward_only=min(frozen, places * chunks - 1))
    lowered = with_messages(order("interleaved", placement, slices), placement)
    validate(lowered, slices, "interleaved", placement)
    # Narayanan et al. 2021, section 2.2.2: (K - 1) (t_f + t_b) / v beside the ideal of all units
    times = {Op.FORWARD: 1 / chunks, Op.BACKWARD: 2 / chunks}
    found = simulate(order("interleaved", whole, slices), lambda action: times[action.op], placement=whole)
    assert found.makespan == pytest.approx(3 * sum(slices) + 3 * (places - 1) / chunks, rel=1e-9)


def test_what_does_not_go_around_is_ordered_as_by_1f1b():
    for placement, slices in ((Placement.interleaved(4, 2), [1] * 6), (Placement.of([0, 1, 1, 0]), [2, 2])):
        for function in (order, peak_live_units):
            assert function("interleaved", placement, slices) == function("1f1b", placement, slices)


def test_a_schedule_of_ones_own_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr("ds_terapipe.schedule.orders.registry._SCHEDULES", {})

    def one_by_one(placement, slices):
        """A unit's whole way there and back before the next unit starts; of unsliced micro-batches."""
        each = [(op, Unit(m, 0)) for m in range(len(slices)) for op in (Op.FORWARD, Op.BACKWARD)]
        return [[Action(op, stage, unit) for op, unit in each] for stage in range(placement.places)]

    made = register(Schedule("one-by-one", one_by_one, lambda placement, slices: [1] * placement.places, "mine"))
    assert schedule_named("one-by-one") is made and names_on(Placement.plain(2)) == ("one-by-one",)
    assert parse({"token_pipeline": {"slices": 1, "schedule": "one-by-one"}}).schedule == "one-by-one"
    validate(order("one-by-one", 3, [1, 1]), [1, 1], "one-by-one")
    with pytest.raises(ScheduleError, match="stage 0 holds 2 live units, 'one-by-one' holds 1 at most"):
        validate(grid_of("0F0.0 0F1.0 0B0.0 0B1.0"), [1, 1], "one-by-one")
    with pytest.raises(ValueError, match="'one-by-one' a second time"):
        register(made)


@pytest.mark.parametrize("slices", [[4], [4, 4], [1] * 4, [4] * 4])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_two_receives_ahead_lock_up(name, stages, slices):
    grid = with_weight_gradients(with_messages(order(name, stages, slices)))
    assert not queue_deadlock(grid)
    assert queue_deadlock(grid, posted_ahead=2)


def test_an_order_that_only_more_queues_let_through_is_refused_before_the_first_step():
    units = [f"{m}.0" for m in range(8)]
    grid = grid_of(
        " ".join([f"0F{u} 0SEND_F{u}" for u in units] + [f"0RECV_B{u} 0B{u}" for u in units]),
        " ".join(f"1RECV_F{u} 1F{u} 1B{u} 1SEND_B{u}" for u in units),
    )
    assert not replay(grid, lambda action: 1).stuck
    with pytest.raises(ScheduleError, match=r"stages 0, 1 wait for ever with CUDA_DEVICE_MAX_CONNECTIONS=1") as raised:
        validate(grid, [1] * 8)
    assert str(raised.value).count("holds what was issued after it") == 2
