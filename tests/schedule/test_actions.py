"""The words of a schedule: actions as text, stages on places; messages and weight gradients that are put into an order."""

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.schedule import ALL, Action, Group, Op, Placement, Unit, order, validate
from ds_terapipe.schedule.lower import covered_slices, with_messages, with_weight_gradients
from tests.schedule import strategies
from tests.schedule.strategies import rows_of

number = st.integers(0, 10**6)
units = st.builds(Unit, number, number)
groups = st.integers(1, 99).flatmap(lambda count: st.builds(Group, st.integers(0, count - 1), st.just(count)))


@given(
    st.builds(Action, st.sampled_from(Op), number, units, st.just(ALL))
    | st.builds(Action, st.just(Op.WEIGHT_GRADIENTS), number, units, groups)
)
def test_text_parses_back(action):
    parsed = Action.from_text(str(action))
    assert parsed == action and isinstance(parsed.op, Op) and isinstance(parsed.unit, Unit)


@given(st.text(alphabet="0123FBW.SENDRCV_ -/of", max_size=12))
def test_only_the_exact_text_parses(text):
    try:
        assert str(Action.from_text(text)) == text
    except ValueError:
        return


def test_what_is_no_placement_and_no_step():
    for make, message in (
        (lambda: Placement.of([0, 2]), r"got stages on places \[0, 2\], must be on 0, 1, ... without a gap"),
        (lambda: Placement.of([0, 1], [0, 2, 2]), "layers 2 to 2 for stage 1, must start at layer 2 and stop at a"),
        (lambda: validate([[]], [2, 0]), r"slices: got \[2, 0\], must list one positive number of slices for each"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_weight_gradients_come_after_what_the_stage_before_waits_for():
    first = with_weight_gradients(with_messages(order("1f1b", 2, [2])))
    assert rows_of(first, 5) == ["0RECV_B0.1 0B0.1 0RECV_B0.0 0B0.0 0W0.0", "1B0.1 1SEND_B0.1 1B0.0 1SEND_B0.0 1W0.0"]
    assert with_messages(with_weight_gradients(order("1f1b", 2, [2]))) == first
    placement = Placement.of([0, 0, 1, 1], forward_only=1)
    lowered = with_messages(order("1f1b", placement, [2]), placement)
    assert rows_of(with_weight_gradients(lowered, placement), 6) == [
        "1SEND_F0.1 1RECV_B0.1 1B0.1 1RECV_B0.0 1B0.0 1W0.0",
        "2SEND_B0.1 3B0.0 2B0.0 2SEND_B0.0 3W0.0 2W0.0",
    ]
    some = with_weight_gradients(lowered, placement, stages=[0, 3])
    assert [str(a) for row in some for a in row if a.op is Op.WEIGHT_GRADIENTS] == ["3W0.0"]


@settings(deadline=None)
@given(strategies.names_and_late, strategies.placements(), strategies.few_slices, st.data())
def test_weight_gradients_on_any_placement_are_made_once_a_micro_batch(name, placement, slices, data):
    stages = data.draw(st.none() | st.sets(st.integers(0, len(placement.stages) - 1)))
    grid = order(name, placement, slices)
    made = with_weight_gradients(with_messages(grid, placement), placement, stages)
    validate(made, slices, name, placement)
    for stage in range(len(placement.stages)):
        row = [action for action in made[placement.place_of(stage)] if action.stage == stage]
        units = [action.unit for action in row if action.op is Op.WEIGHT_GRADIENTS]
        wanted = [a.unit for a in row if a.op is Op.FORWARD and a.unit.slice == 0]
        apart = (stages is None or stage in stages) and placement.goes_backward(stage)
        ordered = [a for a in grid[placement.place_of(stage)] if a.op is Op.WEIGHT_GRADIENTS and a.stage == stage]
        if ordered and apart:  # they stay where the order has them, and make those of every slice once
            assert units == [action.unit for action in ordered]
            covered = covered_slices(row, slices)
            assert sum(len(found) / each.group.groups for each, found in covered.items()) == sum(slices)
        else:
            assert sorted(units) == (sorted(wanted) if apart else [])
