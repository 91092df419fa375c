"""The simulator against closed forms, a plain event loop of its own, and what is known of each schedule's memory."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    NAMES,
    Action,
    Op,
    Placement,
    ScheduleError,
    Simulation,
    forward_only,
    order,
    simulate,
    with_messages,
    with_weight_gradients,
)
from tests.mutants import applied

from . import strategies

seconds = st.floats(0.001, 10.0)
CLOSE = 1e-6
"""Relative: sums of times in another order."""


def _by_slice(forward, backward):
    """Costs that depend on the slice alone."""
    return lambda action: (forward if action.op is Op.FORWARD else backward)[action.unit.slice]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 6), st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8))
def test_flush_with_equal_stages_is_the_closed_form(stages, micro_batches, slices):
    forward, backward = [f for f, _ in slices], [b for _, b in slices]
    grid = order("terapipe", stages, [len(slices)] * micro_batches)
    expected = micro_batches * sum(forward + backward) + (stages - 1) * (max(forward) + max(backward))
    assert simulate(grid, _by_slice(forward, backward)).makespan == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(("terapipe", "1f1b")), st.integers(1, 8), strategies.slices, seconds, seconds)
def test_slices_of_equal_cost_are_the_closed_form_under_both_orders(name, stages, slices, forward, backward):
    result = simulate(order(name, stages, slices), lambda a: forward if a.op is Op.FORWARD else backward)
    units = sum(slices)
    if name == "terapipe" or len(set(slices)) == 1:
        assert result.makespan == pytest.approx((units + stages - 1) * (forward + backward), rel=1e-9)
    for stage in result.places:
        assert stage.imbalance == pytest.approx(0, abs=1e-9 * result.makespan)
        assert stage.busy == pytest.approx(units * (forward + backward))


def _event_loop(grid, compute, message, placement=None):
    """Another way to the same ends: go over all stages until nothing moves any more."""
    placement = placement or Placement.plain(len(grid))
    at, clock, free, arrived, ends = [0] * len(grid), [0.0] * len(grid), {}, {}, {}
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(grid):
            while at[stage] < len(row):
                action = row[at[stage]]
                if action.op.is_receive:
                    if action not in arrived:
                        break
                    clock[stage] = max(clock[stage], arrived[action])
                elif action.op.is_send:
                    link = stage, placement.place_of(action.counterpart.stage)
                    free[link] = max(free.get(link, 0.0), clock[stage]) + message(action)
                    arrived[action.counterpart] = free[link]
                else:
                    clock[stage] += compute(action)
                ends[action] = clock[stage]
                at[stage] += 1
                moved = True
    return ends


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.integers(1, 5), strategies.slices, st.booleans(), st.randoms(use_true_random=False))
def test_spans_equal_those_of_an_event_loop(name, stages, slices, weights, random):
    grid = with_messages(order(name, stages, slices))
    grid = with_weight_gradients(grid) if weights else grid
    times = {action: random.uniform(0.01, 5) for row in grid for action in row}
    result = simulate(grid, times.__getitem__, times.__getitem__)
    expected = _event_loop(grid, times.__getitem__, times.__getitem__)
    assert _off(result, grid, expected) <= CLOSE
    for intervals in result.intervals:
        assert [interval.start for interval in intervals[1:]] == [interval.end for interval in intervals[:-1]]
    assert result.makespan >= max(expected.values()) - 1e-9


@settings(deadline=None, max_examples=40)
@given(strategies.placements(), strategies.few_slices, st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_so_do_those_of_any_order_on_any_placement(placement, slices, seed, random):
    grid = strategies.random_grid(seed, placement, slices[:3], weights=True, each_slice=bool(seed % 2)).grid
    # messages that take longer than computations queue on their links
    times = {a: random.uniform(0.01, 1 if a.op.is_compute else 20) for row in grid for a in row}
    result = simulate(grid, times.__getitem__, times.__getitem__, placement=placement)
    expected = _event_loop(grid, times.__getitem__, times.__getitem__, placement)
    assert _off(result, grid, expected) <= CLOSE
    for place, (found, row) in enumerate(zip(result.places, grid, strict=True)):
        assert found.busy == pytest.approx(sum(times[action] for action in row if action.op.is_compute))
        assert found.busy + found.idle == pytest.approx(result.makespan)
        assert min(found.fill, found.imbalance, found.messages) >= 0
        assert found.peak_units == _most_live(row, placement), place


def _most_live(row, placement):
    """Pairs of stage and unit between forward and backward, counted anew at each action."""
    trained = [action for action in row if placement.goes_backward(action.stage)]
    live = (
        {(a.stage, a.unit) for a in trained[:index] if a.op is Op.FORWARD}
        - {(a.stage, a.unit) for a in trained[:index] if a.op is Op.BACKWARD}
        for index in range(len(trained) + 1)
    )
    return max(map(len, live))


def _off(result, grid, expected):
    """The largest relative difference of an action's end from the event loop's."""
    rows = zip(grid, result.intervals, strict=True)
    ends = [
        (interval.end, expected[action])
        for row, intervals in rows
        for action, interval in zip(row, intervals, strict=True)
    ]
    return max(abs(end / right - 1) for end, right in ends)


def ends_off_by(mutant):
    """The largest of these differences under a mutant, in tolerances; for ``tests.mutants``."""
    worst = 0.0
    for name in NAMES:
        random = Random(name)
        grid = with_weight_gradients(with_messages(order(name, 3, [3, 2])))
        times = {action: random.uniform(0.01, 5) for row in grid for action in row}
        with applied(mutant):
            result = simulate(grid, times.__getitem__, times.__getitem__)
        worst = max(worst, _off(result, grid, _event_loop(grid, times.__getitem__, times.__getitem__)) / CLOSE)
    return worst


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(NAMES), st.integers(1, 5), strategies.slices, st.randoms(use_true_random=False))
def test_idle_time_adds_up_and_no_part_is_negative(name, stages, slices, random):
    grid = with_messages(order(name, stages, slices))
    times = {action: random.uniform(0.01, 5) for row in grid for action in row}
    result = simulate(grid, times.__getitem__, times.__getitem__)
    for stage in result.places:
        assert min(stage.fill, stage.imbalance, stage.messages) >= 0
        assert stage.busy + stage.idle == pytest.approx(result.makespan)
    assert sum(result.bubble_shares.values()) == pytest.approx(result.bubble)
    assert result.bubble == pytest.approx(1 - sum(s.busy for s in result.places) / (stages * result.makespan))


def test_the_parts_of_the_bubble_name_their_cause():
    def run(compute, message=None) -> Simulation:
        return simulate(order("terapipe", 3, [2]), compute, message)

    even = run(lambda action: 1.0)
    assert [tuple(stage[:4]) for stage in even.places] == [(4, 4, 0, 0)] * 3
    slow_stage = run(lambda action: 2.0 if action.stage == 1 else 1.0)
    assert (slow_stage.makespan, [stage.busy for stage in slow_stage.places]) == (12, [4, 8, 4])
    # evenly spread the same work would leave (3 - 1) (4 / 3 + 4 / 3) s idle on each stage
    assert [stage.fill for stage in slow_stage.places] == pytest.approx([16 / 3, 4, 16 / 3])
    assert [stage.imbalance for stage in slow_stage.places] == pytest.approx([8 / 3, 0, 8 / 3])
    assert slow_stage.bubble_shares["messages"] == 0
    slow_link = run(lambda action: 1.0, lambda action: 0.5)
    assert [tuple(stage[:4]) for stage in slow_link.places] == [(4, 4, 0, 2)] * 3  # 4 hops on the way there and back


@pytest.mark.parametrize(("name", "slices", "live"), [("1f1b", 4, 2.75), ("terapipe", 4, 32), ("1f1b", 1, 8)])
def test_live_sequences_on_the_first_of_eight_stages(name, slices, live):
    length = 2048
    result = simulate(
        order(name, 8, [slices] * 32),
        lambda action: 1.0,
        tokens=lambda action: length // slices,
        held=lambda action: 10.0 * length / slices,
    )
    assert result.places[0].peak_tokens <= (live + 0.1) * length
    assert result.places[0].peak_tokens == live * length
    assert result.places[0].peak_units == live * slices
    assert result.places[0].peak_bytes == 10 * live * length


def test_a_grid_that_would_wait_for_ever_is_an_error():
    grid = with_messages(order("1f1b", 2, [1]))
    grid[0].remove(Action.from_text("0SEND_F0.0"))
    with pytest.raises(ScheduleError, match=r"stage 1 for 0SEND_F0\.0"):
        simulate(grid, lambda action: 1.0)


def test_places_are_named_where_a_grid_would_wait_for_ever():
    placement = Placement.of([0, 1, 0])
    grid = with_messages(order("1f1b", placement, [1]), placement)
    grid[0].remove(Action.from_text("0SEND_F0.0"))
    with pytest.raises(ScheduleError, match=r"place 0 for 1SEND_F0\.0, place 1 for 0SEND_F0\.0"):
        simulate(grid, lambda action: 1.0, placement=placement)


def test_what_a_forward_only_stage_holds_is_not_live():
    placement = Placement.of([0, 0, 1], forward_only=1)
    result = simulate(
        order("1f1b", placement, [2, 2]),
        lambda action: 1.0,
        tokens=lambda action: 10**action.stage,
        held=lambda action: float(10**action.stage),
        placement=placement,
    )
    assert [place[4:] for place in result.places] == [(3, 30, 30.0), (2, 200, 200.0)]
    evaluation = simulate(forward_only(placement, [2]), lambda action: 1.0, placement=placement)
    assert [place.peak_units for place in evaluation.places] == [0, 0]


def test_evaluation_and_an_empty_grid():
    assert simulate(forward_only(3, [2, 2]), lambda action: 1.0).makespan == 4 + 2
    result = simulate([[]], lambda action: 1.0)
    assert (result.makespan, result.bubble) == (0, 0)
