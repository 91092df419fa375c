"""Messages that run one behind the other: a group per direction locks up from three stages on, a group per channel never."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    EVAL_SENT_KEPT,
    POSTED_AHEAD,
    Action,
    Op,
    Placement,
    ScheduleError,
    Unit,
    order,
    replay,
    stream_deadlock,
    validate,
    with_messages,
)
from ds_terapipe.schedule.streams import group_per_direction
from tests.schedule import strategies
from tests.schedule.strategies import grid_of


@given(strategies.names | st.just("forward_only"), strategies.stages, strategies.slices)
@settings(max_examples=60)
def test_a_group_per_channel_never_locks_up(name, stages, slices):
    assert not stream_deadlock(with_messages(order(name, stages, slices)))


@given(strategies.random_grids(most_stages=5), st.integers(1, 3), st.integers(0, 3))
def test_nor_under_any_other_valid_order(made, posted_ahead, sent_kept):
    validate(made.grid, made.slices)
    assert not stream_deadlock(made.grid, posted_ahead=posted_ahead, sent_kept=sent_kept)


# How the messages of a pipeline ran before each channel had a group of its own: the least that locks up.
@pytest.mark.parametrize("stages", [3, 4, 8])
@pytest.mark.parametrize("slices", [[1] * 4, [3] * 2, [8] * 2])
def test_a_group_per_direction_locks_up(stages, slices):
    grid = with_messages(order("1f1b", stages, slices))
    stuck = stream_deadlock(grid, group_per_direction)
    assert len(stuck) == stages and all(grid[stage][index].op.is_receive for stage, index in stuck.items())


@pytest.mark.parametrize(("kept", "units"), [(None, EVAL_SENT_KEPT + POSTED_AHEAD), (1, 3)])
def test_outputs_that_no_gradient_answers_are_bounded(kept, units):
    # Stage by stage around two places: stage 1's outputs are taken once place 0 has made all outputs of stage 0. Each of the
    # two can have so many units on their way, and stage 1 has one in hand.
    around = Placement.interleaved(2, 2)

    def stage_by_stage(count):
        each = [Unit(m, 0) for m in range(count)]
        grid = [
            [Action(Op.FORWARD, stage, unit) for stage in around.stages_on(place) for unit in each] for place in (0, 1)
        ]
        return with_messages(grid, around)

    count = 2 * units + 1
    free, more = stage_by_stage(count), stage_by_stage(count + 1)
    assert not stream_deadlock(free, sent_kept=kept, placement=around)
    assert set(stream_deadlock(more, sent_kept=kept, placement=around)) == {0, 1}
    if kept is None:
        validate(free, [1] * count, "forward_only", around)
        with pytest.raises(ScheduleError, match="deadlock: places 0, 1 wait for ever"):
            validate(more, [1] * (count + 1), "forward_only", around)


@pytest.mark.parametrize(("frozen", "locks"), [(0, False), (1, False), (2, True)])
def test_a_forward_only_stage_is_bounded_in_training_and_others_are_not(frozen, locks):
    # Place 0 takes what stage 1 made only after it has sent all that stage 0 makes: stage 1's sends must be free.
    placement, each = Placement.of([0, 1, 0], forward_only=frozen), [Unit(m, 0) for m in range(14)]
    grid = [[Action(Op.FORWARD, stage, unit) for stage in stages for unit in each] for stages in ((0, 2), (1,))]
    for row, stages in zip(grid, ((2, 0), (1,)), strict=True):
        row += [Action(Op.BACKWARD, s, unit) for unit in each for s in stages if placement.goes_backward(s)]
    assert bool(stream_deadlock(with_messages(grid, placement), placement=placement)) == locks
    if locks:
        with pytest.raises(ScheduleError, match="deadlock: places 0, 1 wait for ever"):
            validate(grid, [1] * len(each), None, placement)
    else:
        validate(grid, [1] * len(each), None, placement)


@given(strategies.placements(), strategies.few_slices, st.booleans(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_the_validator_takes_any_order_on_any_placement_that_does_not_lock_up(placement, slices, weights, seed):
    made = strategies.random_grid(seed, placement, slices[:3], weights, each_slice=bool(seed % 2))
    if stream_deadlock(made.grid, placement=placement):
        with pytest.raises(ScheduleError, match="deadlock"):
            validate(made.grid, made.slices, None, placement)
    else:
        validate(made.grid, made.slices, None, placement)
    assert not replay(made.grid, lambda action: 1, placement=placement).stuck


def test_stages_that_wait_crosswise_are_found():
    once = "0F0.0 0SEND_F0.0 0RECV_B0.0 0B0.0"
    assert not stream_deadlock(grid_of(once, "1RECV_F0.0 1F0.0 1B0.0 1SEND_B0.0"), sent_kept=0)
    # stage 1 wants the second micro-batch before it hands back the gradient that stage 0 waits for
    second = "1RECV_F0.0 1F0.0 1B0.0 1RECV_F1.0 1F1.0 1SEND_B0.0 1B1.0 1SEND_B1.0"
    cross = grid_of(f"{once} {once.replace('0.0', '1.0')}", second)
    assert stream_deadlock(cross) == {0: 2, 1: 3}
    with pytest.raises(ScheduleError, match="deadlock: stages 0, 1 wait for ever"):
        validate(cross, [1, 1])
