"""Each kind of damage to a good schedule must be found, and shown where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    Action,
    Op,
    Placement,
    ScheduleError,
    dry_run,
    forward_only,
    order,
    validate,
    with_messages,
)

from . import strategies

SLICES = [3, 2]


def lowered(name="1f1b", stages=3, slices=SLICES):
    return with_messages(order(name, stages, slices))


def swap(grid, first, second):
    """Exchanges two actions of one stage."""
    row = grid[Action.from_text(first).stage]
    i, j = row.index(Action.from_text(first)), row.index(Action.from_text(second))
    row[i], row[j] = row[j], row[i]


def swap_on(row, first, second):
    """The same, within a place's row."""
    i, j = row.index(Action.from_text(first)), row.index(Action.from_text(second))
    row[i], row[j] = row[j], row[i]


def remove(grid, text):
    action = Action.from_text(text)
    grid[action.stage].remove(action)


def marked_lines(error):
    """The lines of the message with a mark, checked to hold a bracketed cell each."""
    lines = [line for line in str(error.value).splitlines() if "<--" in line]
    assert lines, error.value
    assert all("[" in line for line in lines)
    return "\n".join(lines)


def refuses(grid, match, slices=SLICES, name="1f1b"):
    with pytest.raises(ScheduleError, match=match) as error:
        validate(grid, slices, name)
    return marked_lines(error)


@given(strategies.names, st.integers(2, 5), strategies.slices, st.data())
def test_dropping_any_action_is_found(name, stages, slices, data):
    grid = lowered(name, stages, slices)
    row = grid[data.draw(st.integers(0, stages - 1))]
    del row[data.draw(st.integers(0, len(row) - 1))]
    with pytest.raises(ScheduleError):
        validate(grid, slices, name)


@given(strategies.names, st.integers(2, 5), strategies.slices, st.data())
def test_duplicating_any_action_is_found(name, stages, slices, data):
    grid = lowered(name, stages, slices)
    row = grid[data.draw(st.integers(0, stages - 1))]
    row.insert(data.draw(st.integers(0, len(row))), data.draw(st.sampled_from(row)))
    with pytest.raises(ScheduleError):
        validate(grid, slices, name)


@given(strategies.names, st.integers(1, 5), strategies.slices, st.data())
def test_dropping_any_computation_of_an_order_is_found(name, stages, slices, data):
    grid = order(name, stages, slices)
    row = grid[data.draw(st.integers(0, stages - 1))]
    del row[data.draw(st.integers(0, len(row) - 1))]
    with pytest.raises(ScheduleError):
        validate(grid, slices, name)


def test_dropped_forward():
    grid = lowered()
    remove(grid, "1F0.1")
    assert "[1SEND_F0.1]" in refuses(grid, "1SEND_F0.1 needs 1F0.1 before it")


def test_dropped_last_backward_is_marked_at_the_end():
    grid = order("1f1b", 3, SLICES)
    remove(grid, "1B1.0")
    assert "[end]  " in refuses(grid, "1B1.0 is missing")


def test_duplicated_forward():
    grid = lowered()
    grid[0].insert(grid[0].index(Action.from_text("0F0.2")), Action.from_text("0F0.0"))
    assert "[0F0.0]" in refuses(grid, "0F0.0 is there a second time")


def test_two_slices_swapped_forward():
    grid = order("1f1b", 3, SLICES)
    swap(grid, "2F0.0", "2F0.1")
    assert "[2F0.1]" in refuses(grid, "2F0.1 needs 2F0.0 before it: slices .* ascending")


def test_two_slices_swapped_backward():
    grid = order("terapipe", 3, SLICES)
    swap(grid, "1B0.2", "1B0.0")
    assert "[1B0.0]" in refuses(grid, "1B0.0 needs 1B0.1 before it: slices .* descending", name="terapipe")


def test_two_micro_batches_swapped_on_one_stage():
    grid = order("terapipe", 2, [1, 1])
    swap(grid, "1F0.0", "1F1.0")
    assert "<-- stage 1: 1RECV_F1.0 meets 0SEND_F0.0" in refuses(grid, "in one order", [1, 1], "terapipe")


def test_swapped_sends():
    grid = lowered("terapipe")
    sends = [i for i, action in enumerate(grid[1]) if action.op is Op.SEND_FORWARD]
    row = [action for i, action in enumerate(grid[1]) if i not in sends[:2]]
    behind = row.index(Action.from_text("1F0.1")) + 1
    grid[1] = [*row[:behind], grid[1][sends[1]], grid[1][sends[0]], *row[behind:]]
    assert "[1SEND_F0.1]" in refuses(grid, "2RECV_F0.0 meets 1SEND_F0.1", name="terapipe")


def test_send_before_its_computation():
    grid = lowered()
    swap(grid, "0F0.1", "0SEND_F0.1")
    assert "[0SEND_F0.1]" in refuses(grid, "0SEND_F0.1 needs 0F0.1 before it")
    grid = lowered()
    swap(grid, "2B1.0", "2SEND_B1.0")
    assert "[2SEND_B1.0]" in refuses(grid, "2SEND_B1.0 needs 2B1.0 before it")


@pytest.mark.parametrize("receive", ["1RECV_F0.1", "1RECV_B1.0"])
def test_removed_receive(receive):
    grid = lowered()
    remove(grid, receive)
    assert f"[{receive.replace('RECV_', '')}]" in refuses(grid, f"needs {receive} before it: it is the")


def test_removed_send():
    grid = lowered()
    remove(grid, "1SEND_B0.0")
    assert "[end]" in refuses(grid, "1SEND_B0.0 is missing")


def test_backward_before_its_forward():
    grid = order("1f1b", 2, [1, 1])
    swap(grid, "1F0.0", "1B0.0")
    assert "[1B0.0]" in refuses(grid, "1B0.0 needs 1F0.0 before it: a unit goes forward", [1, 1])


def test_deadlock_shows_where_every_stage_waits():
    # Every stage is right by itself and each channel has one order, but stage 0 wants the first gradient before it
    # sends the second micro-batch, which stage 1 wants before it goes backward.
    grid = with_messages(
        [list(map(Action.from_text, row.split())) for row in ("0F0.0 0B0.0 0F1.0 0B1.0", "1F0.0 1F1.0 1B0.0 1B1.0")]
    )
    with pytest.raises(ScheduleError, match="deadlock: stages 0, 1 wait for ever") as error:
        validate(grid, [1, 1])
    text = str(error.value)
    assert "<-- stage 0: waits for 1SEND_B0.0" in text
    assert ", stage 1: waits for 0SEND_F1.0" in text
    with pytest.raises(ScheduleError, match="deadlock"):
        dry_run(grid)


def test_live_units_must_stay_within_the_bound():
    grid = order("terapipe", 2, [1] * 4)
    validate(grid, [1] * 4)
    assert "[0F2.0]" in refuses(grid, "stage 0 holds 3 live units, '1f1b' holds 2 at most", [1] * 4)
    validate(order("1f1b", 2, [1] * 4), [1] * 4, "terapipe")  # fewer are as good
    # Still a valid schedule, but one forward too early.
    grid = order("1f1b", 2, [1] * 4)
    swap(grid, "1B0.0", "1F1.0")
    validate(grid, [1] * 4)
    assert "[1F1.0]" in refuses(grid, "stage 1 holds 2 live units, '1f1b' holds 1 at most", [1] * 4)


@pytest.mark.parametrize(
    ("index", "text", "match"),
    [
        (1, "2F0.0", "belongs to stage 2"),
        (1, "1F2.0", "does not exist"),
        (1, "1F1.2", "does not exist"),
        (2, "2SEND_F0.0", "no place on stage 2"),
    ],
)
def test_action_in_the_wrong_place(index, text, match):
    grid = lowered()
    grid[index].insert(0, Action.from_text(text))
    assert f"[{text}]" in refuses(grid, match)


def test_forward_only():
    grid = forward_only(3, SLICES)
    validate(grid, SLICES)
    validate(with_messages(grid), SLICES, "forward_only")
    refuses(grid, "0B0.0 is missing", name="1f1b")
    refuses(order("1f1b", 3, SLICES), "has no place on stage 0, which does F only", name="forward_only")


PLACED = Placement.of([0, 1, 1, 0], forward_only=1)


@given(strategies.names, strategies.placements(), strategies.few_slices, st.data())
def test_dropping_any_action_of_a_place_is_found(name, placement, slices, data):
    grid = with_messages(order(name, placement, slices), placement)
    row = grid[data.draw(st.integers(0, placement.places - 1))]
    if row:
        del row[data.draw(st.integers(0, len(row) - 1))]
        with pytest.raises(ScheduleError):
            validate(grid, slices, name, placement)


@pytest.mark.parametrize(
    ("place", "change", "match"),
    [
        (1, ("1F0.0 2F0.0", "2F0.0 1F0.0"), "2F0.0 needs 1F0.0 before it: it makes the input"),
        (1, ("2B0.0 1B0.0", "1B0.0 2B0.0"), "1B0.0 needs 2B0.0 before it: it makes the gradient of the output"),
        (
            1,
            ("1F0.0 2F0.0", "1F0.0 1SEND_F0.0 2F0.0"),
            "1SEND_F0.0 has no place on stage 1, which does F, RECV_F, B only",
        ),
        (1, ("1B0.0", "1B0.0 1SEND_B0.0"), "1SEND_B0.0 has no place on stage 1"),
        (0, ("3B0.0", "3B0.0 0B0.0"), "0B0.0 has no place on stage 0, which does F, SEND_F only"),
        (0, ("3B0.0", "3B0.0 1B0.0"), "1B0.0 belongs to stage 1, which is not on place 0"),
        (0, (" 3B0.0 3SEND_B0.0", ""), r"3B0.0 is missing \(and 1 more\)"),
        (0, ("0F0.0 0SEND_F0.0", "0F0.0"), "0SEND_F0.0 is missing"),
    ],
)
def test_rules_of_a_place(place, change, match):
    rows = [" ".join(map(str, row)) for row in with_messages(order("1f1b", PLACED, [1]), PLACED)]
    assert change[0] in rows[place]
    rows[place] = rows[place].replace(*change)
    with pytest.raises(ScheduleError, match=match) as error:
        validate([list(map(Action.from_text, row.split())) for row in rows], [1], "1f1b", PLACED)
    assert f"<-- place {place}: " in marked_lines(error)


def test_live_units_of_a_place_are_those_of_its_trained_stages():
    two = [list(map(Action.from_text, ["0F0.0", "1F0.0", "0F1.0", "1F1.0", "1B0.0", "0B0.0", "1B1.0", "0B1.0"]))]
    validate(two, [1, 1], None, Placement.of([0, 0]))
    with pytest.raises(ScheduleError, match="place 0 holds 3 live units, '1f1b' holds 2 at most"):
        validate(two, [1, 1], "1f1b", Placement.of([0, 0]))
    frozen = [[action for action in two[0] if action.op is Op.FORWARD or action.stage == 1]]
    with pytest.raises(ScheduleError, match="place 0 holds 2 live units, '1f1b' holds 1 at most"):
        validate(frozen, [1, 1], "1f1b", Placement.of([0, 0], forward_only=1))


def test_channels_of_places():
    placement = Placement.interleaved(2, 2)
    grid = with_messages(forward_only(placement, [1, 1]), placement)
    swap_on(grid[1], "3RECV_F0.0", "3RECV_F1.0")
    swap_on(grid[1], "3F0.0", "3F1.0")
    with pytest.raises(ScheduleError, match=r"3RECV_F1.0 meets 2SEND_F0.0") as error:
        validate(grid, [1, 1], "forward_only", placement)
    assert "place 0" in marked_lines(error) and "place 1" in marked_lines(error)


def test_an_evaluation_has_no_backward_whatever_the_placement():
    for placement in (PLACED, Placement.of([0, 1, 1, 0], forward_only=4)):
        grid = forward_only(placement, [2])
        validate(grid, [2], "forward_only", placement)
        validate(with_messages(grid, placement), [2], None, placement)
        assert dry_run(grid, placement) >= 8 / 2
    with pytest.raises(ScheduleError, match=r"3B0\.0 is missing"):
        validate(forward_only(PLACED, [1]), [1], "1f1b", PLACED)


def test_bad_arguments():
    with pytest.raises(ScheduleError, match="no stages"):
        validate([], [1])
    with pytest.raises(ValueError, match="slices: got"):
        validate(forward_only(1, [1]), [])
    with pytest.raises(ValueError, match="schedule: got 'gpipe'"):
        validate(forward_only(1, [1]), [1], "gpipe")
    with pytest.raises(ValueError, match="placement: got 2 places for a grid of 1 rows"):
        validate(forward_only(1, [1]), [1], None, Placement.plain(2))
    with pytest.raises(ValueError, match="forward_only: got all 2 stages"):
        validate(forward_only(2, [1]), [1], "1f1b", Placement.plain(2, forward_only=2))


def test_message_of_a_large_schedule_stays_readable():
    grid = lowered(stages=32, slices=[8] * 8)
    remove(grid, "20RECV_B3.2")
    with pytest.raises(ScheduleError) as error:
        validate(grid, [8] * 8, "1f1b")
    lines = str(error.value).splitlines()
    assert len(lines) < 15
    assert max(map(len, lines)) < 220
    assert "[20B3.2]" in marked_lines(error)


@pytest.mark.parametrize("name", ["terapipe", "1f1b"])
@given(strategies.stages, strategies.even_slices)
def test_dry_run_takes_the_textbook_number_of_steps(name, stages, slices):
    steps = dry_run(order(name, stages, slices))
    assert steps == 2 * (sum(slices) + stages - 1)


@given(strategies.stages, strategies.slices)
def test_dry_run_of_evaluation(stages, slices):
    assert dry_run(forward_only(stages, slices)) == sum(slices) + stages - 1
