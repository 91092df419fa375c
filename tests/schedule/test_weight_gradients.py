"""Weight gradients as actions of their own: where they stand, and what the validator makes of misplaced ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    NAMES,
    Action,
    Op,
    ScheduleError,
    order,
    peak_live_units,
    validate,
    with_messages,
    with_weight_gradients,
)


def lowered(name: str, stages: int, slices: list[int]) -> list[list[Action]]:
    return with_weight_gradients(with_messages(order(name, stages, slices)))


@given(st.sampled_from(NAMES), st.integers(1, 8), st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_every_stage_makes_them_once_per_micro_batch(name: str, stages: int, slices: list[int]) -> None:
    grid = lowered(name, stages, slices)
    validate(grid, slices, name)
    for row in grid:
        made = [action.unit for action in row if action.op is Op.WEIGHT_GRADIENTS]
        assert sorted(unit.micro_batch for unit in made) == list(range(len(slices)))
        assert all(unit.slice == 0 for unit in made)
    assert peak_live_units(name, stages, slices)[0] >= 1


def test_they_come_after_what_the_stage_before_waits_for() -> None:
    rows = [" ".join(map(str, row[-5:])) for row in lowered("1f1b", 2, [2])]
    assert rows == [
        "0RECV_B0.1 0B0.1 0RECV_B0.0 0B0.0 0W0.0",
        "1B0.1 1SEND_B0.1 1B0.0 1SEND_B0.0 1W0.0",
    ]


def test_text_form_parses_back() -> None:
    for row in lowered("terapipe", 2, [3, 2]):
        for action in row:
            assert Action.from_text(str(action)) == action


def _without(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    grid[stage] = [action for action in grid[stage] if action.op is not Op.WEIGHT_GRADIENTS]
    return grid


def _too_early(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    weights = grid[stage].pop()
    grid[stage].insert(grid[stage].index(Action(Op.BACKWARD, stage, weights.unit)), weights)
    return grid


def _twice(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    grid[stage].append(grid[stage][-1])
    return grid


def _of_a_slice(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    grid[stage][-1] = grid[stage][-1]._replace(unit=grid[stage][-1].unit._replace(slice=1))
    return grid


@pytest.mark.parametrize(
    ("mutate", "says"),
    [(_without, "W0.0 is missing"), (_too_early, "needs"), (_twice, "second time"), (_of_a_slice, "names a slice")],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_the_validator_sees_misplaced_ones(mutate, says: str, stage: int) -> None:
    grid = lowered("1f1b", 2, [3])
    with pytest.raises(ScheduleError, match=says):
        validate(mutate(grid, stage), [3], "1f1b")
