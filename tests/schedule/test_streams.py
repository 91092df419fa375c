"""Messages that run one behind the other: a group per direction locks up from three stages on, a group per channel never."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    Action,
    ScheduleError,
    Unit,
    forward_only,
    order,
    stream_deadlock,
    validate,
    with_messages,
)
from ds_terapipe.schedule.streams import Channel, channel_of, group_per_channel, group_per_direction

from . import strategies


def grid_of(name: str, stages: int, slices: list[int]) -> list[list[Action]]:
    return with_messages(order(name, stages, slices))


@given(strategies.names, strategies.stages, strategies.slices)
@settings(max_examples=60)
def test_a_group_per_channel_never_locks_up(name, stages, slices):
    assert not stream_deadlock(grid_of(name, stages, slices))


@given(strategies.random_grids(most_stages=5), st.integers(1, 3), st.integers(0, 3))
def test_nor_under_any_other_valid_order(made, posted_ahead, sent_kept):
    validate(made.grid, made.slices)
    assert not stream_deadlock(made.grid, posted_ahead=posted_ahead, sent_kept=sent_kept)


@given(strategies.stages, strategies.slices)
@settings(max_examples=30)
def test_nor_an_evaluation(stages, slices):
    assert not stream_deadlock(with_messages(forward_only(stages, slices)))


# How the messages of a pipeline ran before each channel had a group of its own: the least that locks up.
@pytest.mark.parametrize("stages", [3, 4, 5, 8])
@pytest.mark.parametrize("slices", [[1] * 4, [2] * 3, [3] * 2, [4] * 2, [8] * 2])
def test_a_group_per_direction_locks_up(stages, slices):
    grid = grid_of("1f1b", stages, slices)
    stuck = stream_deadlock(grid, group_per_direction)
    assert len(stuck) == stages
    for stage, index in stuck.items():
        assert grid[stage][index].op.is_receive


@pytest.mark.parametrize(
    ("name", "stages", "slices"),
    [("1f1b", 2, [4] * 4), ("1f1b", 4, [8]), ("terapipe", 4, [4] * 4), ("1f1b", 3, [1] * 3)],
)
def test_what_a_group_per_direction_can_run(name, stages, slices):
    assert not stream_deadlock(grid_of(name, stages, slices), group_per_direction)


def test_stages_that_wait_crosswise_are_found():
    grid = [
        [Action.from_text(text) for text in ["0F0.0", "0SEND_F0.0", "0RECV_B0.0", "0B0.0"]],
        [Action.from_text(text) for text in ["1RECV_F0.0", "1F0.0", "1B0.0", "1SEND_B0.0"]],
    ]
    assert not stream_deadlock(grid, sent_kept=0)
    # stage 1 wants the second micro-batch before it hands back the gradient that stage 0 waits for
    cross = [
        [
            Action.from_text(text)
            for text in ["0F0.0", "0SEND_F0.0", "0RECV_B0.0", "0B0.0", "0F1.0", "0SEND_F1.0", "0RECV_B1.0", "0B1.0"]
        ],
        [
            Action.from_text(text)
            for text in ["1RECV_F0.0", "1F0.0", "1B0.0", "1RECV_F1.0", "1F1.0", "1SEND_B0.0", "1B1.0", "1SEND_B1.0"]
        ],
    ]
    assert stream_deadlock(cross) == {0: 2, 1: 3}
    with pytest.raises(ScheduleError, match="deadlock: stages 0, 1 wait for ever"):
        validate(cross, [1, 1])


def test_channels_of_messages():
    unit = Unit(0, 0)
    for text, channel in (
        ("1SEND_F0.0", Channel(1, True)),
        ("2RECV_F0.0", Channel(1, True)),
        ("2SEND_B0.0", Channel(1, False)),
        ("1RECV_B0.0", Channel(1, False)),
    ):
        assert channel_of(Action.from_text(text)) == channel == group_per_channel(channel)
    with pytest.raises(ValueError, match="must be a send or a receive"):
        channel_of(Action.from_text(f"0F{unit}"))
