"""Weight gradients as actions of their own: where they stand, and what the validator makes of misplaced ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    NAMES,
    Action,
    Op,
    Placement,
    ScheduleError,
    order,
    peak_live_units,
    simulate,
    validate,
    with_messages,
    with_weight_gradients,
)

from . import strategies


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


def test_a_segment_makes_them_when_its_gradient_is_on_its_way() -> None:
    placement = Placement.of([0, 0, 1, 1], forward_only=1)
    lowered = with_messages(order("1f1b", placement, [2]), placement)
    rows = [" ".join(map(str, row[-6:])) for row in with_weight_gradients(lowered, placement)]
    assert rows == [
        "1SEND_F0.1 1RECV_B0.1 1B0.1 1RECV_B0.0 1B0.0 1W0.0",
        "2SEND_B0.1 3B0.0 2B0.0 2SEND_B0.0 3W0.0 2W0.0",
    ]
    some = with_weight_gradients(lowered, placement, stages=[0, 3], each_slice=True)
    made = [action for row in some for action in row if action.op is Op.WEIGHT_GRADIENTS]
    assert list(map(str, made)) == ["3W0.1", "3W0.0"]
    validate(some, [2], "1f1b", placement)


@settings(deadline=None)
@given(st.sampled_from(NAMES), strategies.placements(), strategies.few_slices, st.booleans(), st.booleans(), st.data())
def test_on_any_placement_by_slice_or_micro_batch(name, placement, slices, each_slice, first, data) -> None:
    stages = data.draw(st.none() | st.sets(st.integers(0, len(placement.stages) - 1)))
    grid = order(name, placement, slices)
    if first:  # before the messages or after them: the same computations in one order
        made = with_messages(with_weight_gradients(grid, placement, stages, each_slice), placement)
    else:
        made = with_weight_gradients(with_messages(grid, placement), placement, stages, each_slice)
    validate(made, slices, name, placement)
    apart = range(len(placement.stages)) if stages is None else stages
    for stage in range(len(placement.stages)):
        row = made[placement.place_of(stage)]
        units = {action.unit for action in row if action.op is Op.WEIGHT_GRADIENTS and action.stage == stage}
        expected = {
            a.unit for a in row if a.op is Op.FORWARD and a.stage == stage and (each_slice or a.unit.slice == 0)
        }
        assert units == (expected if stage in apart and placement.goes_backward(stage) else set())


def test_of_some_slices_at_once() -> None:
    row = "0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0W0.1 0B0.0 0W0.0"
    validate([list(map(Action.from_text, row.split()))], [3], "1f1b")
    for wrong, says in [
        (row.replace("0W0.1 ", "").replace("0W0.0", "0W0.0 0W0.1"), "0W0.1 comes after 0W0.0, which has made them"),
        (row.replace(" 0W0.0", ""), r"0W0.0 is missing\n"),
        (row.replace("0W0.1", "0W0.0"), "0W0.0 needs 0B0.0 before it: it is the backward that they belong to"),
        (row.replace("0W0.1", "0W0.3"), "0W0.3 names a unit that does not exist"),
    ]:
        with pytest.raises(ScheduleError, match=says):
            validate([list(map(Action.from_text, wrong.split()))], [3], "1f1b")


def test_not_of_a_stage_that_does_not_go_backward() -> None:
    placement = Placement.of([0, 0], forward_only=1)
    grid = order("1f1b", placement, [1])
    grid[0].append(Action.from_text("0W0.0"))
    with pytest.raises(ScheduleError, match=r"0W0\.0 has no place on stage 0, which does F only"):
        validate(grid, [1], "1f1b", placement)


def test_the_simulator_is_asked_for_each_of_them() -> None:
    grid = with_weight_gradients(order("1f1b", 2, [3]), each_slice=True)
    found = simulate(grid, lambda action: 1.0 + (action.op is Op.WEIGHT_GRADIENTS) * action.unit.slice)
    assert [place.busy for place in found.places] == [3 + 3 + 1 + 2 + 3] * 2


def _without(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    grid[stage] = [a for a in grid[stage] if a.op is not Op.WEIGHT_GRADIENTS or a.unit.micro_batch != 1]
    return grid


def _too_early(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    weights = grid[stage].pop()
    grid[stage].insert(grid[stage].index(Action(Op.BACKWARD, stage, weights.unit)), weights)
    return grid


def _twice(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    grid[stage].append(grid[stage][-1])
    return grid


def _of_later_slices(grid: list[list[Action]], stage: int) -> list[list[Action]]:
    grid[stage][-1] = grid[stage][-1]._replace(unit=grid[stage][-1].unit._replace(slice=1))
    return grid


@pytest.mark.parametrize(
    ("mutate", "says"),
    [
        (_without, r"W1\.0 is missing"),
        (_too_early, "needs"),
        (_twice, "second time"),
        (_of_later_slices, r"W1\.0 is missing"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_the_validator_sees_misplaced_ones(mutate, says: str, stage: int) -> None:
    grid = lowered("1f1b", 2, [3, 3])
    with pytest.raises(ScheduleError, match=says):
        validate(mutate(grid, stage), [3, 3], "1f1b")
