"""Replay and simulator: a plain event loop of its own, and what is live."""

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.schedule import Action, Op, Placement, ScheduleError, forward_only, order, replay, simulate, with_messages
from tests.schedule import strategies


def seconds(action):
    assert action.op.is_compute
    return 1.0 if action.op is Op.FORWARD else 2.0


def of_each(grid, intervals):
    rows = zip(grid, intervals, strict=True)
    return {a: interval for row, own in rows for a, interval in zip(row, own, strict=True)}


def test_stuck_stages_are_named_with_the_receive_they_wait_in():
    grid = with_messages(order("1f1b", 2, [1]))
    grid[0].remove(Action.from_text("0SEND_F0.0"))
    assert replay(grid, seconds).stuck == {0: 1, 1: 0}
    with pytest.raises(ScheduleError, match=r"stage 1 for 0SEND_F0\.0"):
        simulate(grid, seconds)
    grid = with_messages(order("terapipe", 2, [1, 1]))  # a receive takes no message but its own
    i, j = (grid[1].index(Action.from_text(text)) for text in ("1RECV_F0.0", "1RECV_F1.0"))
    grid[1][i], grid[1][j] = grid[1][j], grid[1][i]
    assert replay(grid, seconds).stuck == {0: grid[0].index(Action.from_text("0RECV_B1.0")), 1: 0}


def event_loop(grid, compute, message, placement):
    """Another way to the same ends: go over all places until nothing moves any more."""
    at, clock, free, arrived, ended = [0] * len(grid), [0.0] * len(grid), {}, {}, {}
    moved = True
    while moved:
        moved = False
        for place, row in enumerate(grid):
            while at[place] < len(row):
                action = row[at[place]]
                if action.op.is_receive:
                    if action not in arrived:
                        break
                    clock[place] = max(clock[place], arrived[action])
                elif action.op.is_send:
                    link = place, placement.place_of(action.counterpart.stage)
                    free[link] = max(free.get(link, 0.0), clock[place]) + message(action)
                    arrived[action.counterpart] = free[link]
                else:
                    clock[place] += compute(action)
                ended[action] = clock[place]
                at[place] += 1
                moved = True
    return ended


@settings(deadline=None, max_examples=80)
@given(strategies.placements(), strategies.few_slices, st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_spans_of_any_order_on_any_placement_equal_those_of_an_event_loop(placement, slices, seed, random):
    grid = strategies.random_grid(seed, placement, slices[:3])
    # messages that take longer than computations queue on their links
    times = {a: random.uniform(0.01, 1 if a.op.is_compute else 20) for row in grid for a in row}
    result = simulate(grid, times.__getitem__, times.__getitem__, placement=placement)
    expected = event_loop(grid, times.__getitem__, times.__getitem__, placement)
    for action, interval in of_each(grid, result.intervals).items():
        assert interval.end == pytest.approx(expected[action], rel=1e-6)
    for intervals in result.intervals:
        assert [interval.start for interval in intervals[1:]] == [interval.end for interval in intervals[:-1]]
    for found, row in zip(result.places, grid, strict=True):
        assert found.busy == pytest.approx(sum(times[action] for action in row if action.op.is_compute))
        assert found.busy + found.idle == pytest.approx(result.makespan)
        assert min(found.fill, found.imbalance, found.messages) >= 0
    assert sum(result.bubble_shares.values()) == pytest.approx(result.bubble)
    busy = sum(place.busy for place in result.places)
    assert result.bubble == pytest.approx(1 - busy / (placement.places * result.makespan))


def test_the_parts_of_the_bubble_name_their_cause():
    even, slow_stage, slow_link = (
        simulate(order("terapipe", 3, [2]), lambda action, slow=slow: slow if action.stage == 1 else 1.0, message)
        for slow, message in ((1.0, None), (2.0, None), (1.0, lambda action: 0.5))
    )
    assert [tuple(stage[:4]) for stage in even.places] == [(4, 4, 0, 0)] * 3
    assert (slow_stage.makespan, [stage.busy for stage in slow_stage.places]) == (12, [4, 8, 4])
    # evenly spread the same work would leave (3 - 1) (4 / 3 + 4 / 3) s idle on each stage
    assert [stage.fill for stage in slow_stage.places] == pytest.approx([16 / 3, 4, 16 / 3])
    assert [stage.imbalance for stage in slow_stage.places] == pytest.approx([8 / 3, 0, 8 / 3])
    assert slow_stage.bubble_shares["messages"] == 0
    assert [tuple(stage[:4]) for stage in slow_link.places] == [(4, 4, 0, 2)] * 3  # 4 hops on the way there and back


def test_what_a_forward_only_stage_holds_is_not_live():
    placement, each = Placement.of([0, 0, 1], forward_only=1), lambda action: 10**action.stage
    result = simulate(order("1f1b", placement, [2, 2]), lambda action: 1.0, tokens=each, placement=placement)
    assert [place[4:] for place in result.places] == [(3, 30), (2, 200)]
    nothing_live = simulate(forward_only(3, [2, 2]), lambda action: 1.0)
    assert nothing_live.makespan == 4 + 2 and [place[4:] for place in nothing_live.places] == [(0, 0)] * 3
