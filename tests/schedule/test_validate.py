"""Each kind of damage to a good schedule is found, and shown where it is; messages one behind the other lock up nowhere."""

from contextlib import nullcontext

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.schedule import Action, Op, Placement, ScheduleError, Unit, forward_only, order, replay, validate
from ds_terapipe.schedule.hardware_queue import queue_deadlock
from ds_terapipe.schedule.lower import with_messages, with_weight_gradients
from tests.schedule import strategies
from tests.schedule.strategies import grid_of, rows_of

SLICES = [3, 2]
FOLDED = Placement.of([0, 1, 1, 0], forward_only=1)


@given(strategies.names, strategies.placements() | st.integers(2, 5).map(Placement.plain), strategies.few_slices, st.data())
def test_dropping_or_duplicating_any_action_is_found(name, placement, slices, data):
    plain, lowered = order(name, placement, slices), data.draw(st.booleans())
    grid = with_messages(plain, placement) if lowered else plain
    row = data.draw(st.sampled_from([row for row in grid if row]))
    # weight gradients that are left out would be made with others, or in backward passes
    at = data.draw(st.sampled_from([i for i, a in enumerate(row) if a.op is not Op.WEIGHT_GRADIENTS]))
    if data.draw(st.booleans()):
        del row[at]
    else:
        row.insert(at, data.draw(st.sampled_from(row)))
    with pytest.raises(ScheduleError):
        validate(grid, slices, name, placement)


def lowered(name, slices, placement=3, weights=False):
    grid = with_messages(order(name, placement, slices), None if isinstance(placement, int) else placement)
    return with_weight_gradients(grid) if weights else grid


ONE = [1, 1]
LOWERED, EVEN = (lowered("1f1b", SLICES), "1f1b", SLICES, None), order("terapipe", 3, SLICES)
EARLY = order("1f1b", 2, [1] * 4)
# grid, schedule, slices, placement; of each: a row, text in it and what it becomes, the message, the action that is marked
DAMAGE = [
    (LOWERED, [
        (1, "1F0.1 ", "", "1SEND_F0.1 needs 1F0.1 before it", "1SEND_F0.1"),
        (0, "0F0.2 ", "0F0.0 0F0.2 ", "0F0.0 is there a second time", "0F0.0"),
        (1, "1RECV_F0.1 ", "", "needs 1RECV_F0.1 before it: it is the", "1F0.1"),
        (1, "1RECV_F0.0", "2F0.0 1RECV_F0.0", "belongs to stage 2", "2F0.0"),
        (1, "1RECV_F0.0", "1F2.0 1RECV_F0.0", "does not exist", "1F2.0"),
    ]),
    ((EVEN, "terapipe", SLICES, None), [
        (2, "2F0.0 2F0.1", "2F0.1 2F0.0", "2F0.1 needs 2F0.0 before it: slices .* ascending", "2F0.1"),
        (1, "1B0.2 1B0.1", "1B0.1 1B0.2", "1B0.1 needs 1B0.2 before it: slices .* descending", "1B0.1"),
    ]),
    ((order("terapipe", 2, ONE), "terapipe", ONE, None), [
        (1, "1F0.0 1F1.0", "1F1.0 1F0.0", "1RECV_F1.0 meets 0SEND_F0.0.*in one order", "1RECV_F1.0"),
    ]),
    ((EARLY, "1f1b", [1] * 4, None), [
        (1, "1B0.0 1F1.0", "1F1.0 1B0.0", "stage 1 holds 2 live units, '1f1b' holds 1 at most", "1F1.0"),
    ]),
    ((forward_only(3, SLICES), "1f1b", SLICES, None), [(0, "", "", "0B0.0 is missing", "end")]),
    ((order("1f1b", 3, SLICES), "forward_only", SLICES, None), [
        (0, "", "", "has no place on stage 0, which does F only", "0B0.2"),
    ]),
    ((lowered("1f1b", [1], FOLDED), "1f1b", [1], FOLDED), [
        (1, "1F0.0 2F0.0", "2F0.0 1F0.0", "2F0.0 needs 1F0.0 before it: it makes the input", ""),
        (1, "2B0.0 1B0.0", "1B0.0 2B0.0", "1B0.0 needs 2B0.0 before it: it makes the gradient of the output", ""),
        (0, " 3B0.0 3SEND_B0.0", "", r"3B0.0 is missing \(and 1 more\)", ""),
    ]),
    ((lowered("1f1b", [3, 3], 2, True), "1f1b", [3, 3], None), [
        (1, " 1W1.0", "", r"1W1\.0 is missing(?! .and)", ""),
        (1, "1W1.0", "1W1.0 1W1.1", "1W1.1 comes after 1W1.0, which has made them", ""),
        (1, "1W1.0", "1W1.0/0of2", r"1W1\.0/1of2 is missing", ""),
        (1, "1W1.0", "1W1.0/0of2 1W1.0/0of2", r"1W1\.0/0of2 is there a second time", ""),
        (1, "1W1.0", "1W1.0/0of2 1W1.0", r"1W1\.0 comes after others of its micro-batch that name another", ""),
        (1, "1W1.0", "1W1.0/2of2", "names a group that does not exist", ""),
        (1, "1B1.0", "1W1.0/0of2 1B1.0", r"1W1\.0/0of2 needs 1B1\.0 before it: it is the backward that they", ""),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("good", "damage"), [(good, damage) for good, rows in DAMAGE for damage in rows])
def test_damage_is_named_and_marked(good, damage):
    (grid, name, slices, placement), (place, was, becomes, says, marked) = good, damage
    rows = rows_of(grid)
    assert was in rows[place]
    rows[place] = rows[place].replace(was, becomes, 1)
    with pytest.raises(ScheduleError, match=says) as error:
        validate(grid_of(*rows), slices, name, placement)
    lines = [line for line in str(error.value).splitlines() if "<--" in line]
    assert lines and any(f"[{marked}" in line for line in lines)


def test_what_is_right_passes():
    validate(order("1f1b", 2, [1] * 4), [1] * 4, "terapipe")  # fewer live units are as good
    validate(grid_of("0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0W0.1 0B0.0 0W0.0"), [3], "1f1b")
    for placement in (FOLDED, Placement.of([0, 1, 1, 0], forward_only=4)):  # an evaluation has no backward on either
        validate(with_messages(forward_only(placement, [2]), placement), [2], None, placement)
    with pytest.raises(ScheduleError, match=r"3B0\.0 is missing"):
        validate(forward_only(FOLDED, [1]), [1], "1f1b", FOLDED)


def test_a_deadlock_shows_where_every_stage_waits():
    # Every stage is right by itself and each channel has one order, but stage 0 wants the first gradient before it
    # sends the second micro-batch, which stage 1 wants before it goes backward.
    grid = with_messages(grid_of("0F0.0 0B0.0 0F1.0 0B1.0", "1F0.0 1F1.0 1B0.0 1B1.0"))
    with pytest.raises(ScheduleError, match="deadlock: stages 0, 1 wait for ever") as error:
        validate(grid, [1, 1])
    assert "<-- stage 0: waits for 1SEND_B0.0" in str(error.value)
    assert ", stage 1: waits for 0SEND_F1.0" in str(error.value)


def test_live_units_of_a_place_are_those_of_its_trained_stages():
    two = grid_of("0F0.0 1F0.0 0F1.0 1F1.0 1B0.0 0B0.0 1B1.0 0B1.0")
    validate(two, [1, 1], None, Placement.of([0, 0]))
    with pytest.raises(ScheduleError, match="place 0 holds 3 live units, '1f1b' holds 2 at most"):
        validate(two, [1, 1], "1f1b", Placement.of([0, 0]))
    frozen = [[action for action in two[0] if action.op is Op.FORWARD or action.stage == 1]]
    with pytest.raises(ScheduleError, match="place 0 holds 2 live units, '1f1b' holds 1 at most"):
        validate(frozen, [1, 1], "1f1b", Placement.of([0, 0], forward_only=1))


@pytest.mark.parametrize(("frozen", "locks"), [(0, False), (1, False), (2, True)])
def test_a_forward_only_stage_is_bounded_in_training_and_others_are_not(frozen, locks):
    # Place 0 takes what stage 1 made only after it has sent all that stage 0 makes: stage 1's sends must be free.
    placement, each = Placement.of([0, 1, 0], forward_only=frozen), [Unit(m, 0) for m in range(14)]
    grid = [[Action(Op.FORWARD, stage, unit) for stage in stages for unit in each] for stages in ((0, 2), (1,))]
    for row, stages in zip(grid, ((2, 0), (1,)), strict=True):
        row += [Action(Op.BACKWARD, s, unit) for unit in each for s in stages if placement.goes_backward(s)]
    if locks:
        with pytest.raises(ScheduleError, match="deadlock: places 0, 1 wait for ever"):
            validate(grid, [1] * len(each), None, placement)
    else:
        validate(grid, [1] * len(each), None, placement)


@given(strategies.placements(), strategies.few_slices, st.booleans(), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_the_validator_takes_any_order_on_any_placement_that_does_not_lock_up(placement, slices, weights, seed):
    grid = strategies.random_grid(seed, placement, slices[:3], weights)
    locks_up = queue_deadlock(grid) or queue_deadlock(grid, posted_ahead=0)
    with pytest.raises(ScheduleError, match="wait for ever with CUDA_DEVICE_MAX_CONNECTIONS=1") if locks_up else nullcontext():
        validate(grid, slices[:3], None, placement)
    assert not replay(grid, lambda action: 1, placement=placement).stuck
