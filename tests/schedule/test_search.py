"""Searched orders: valid on any placement and under any limit, near the bounds; and orders as text."""

import collections
import itertools
import math

import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.schedule import Action, Op, Placement, Unit, replay, validate
from ds_terapipe.schedule.given import check_text, given as schedule_of, grid_from, text_of
from ds_terapipe.schedule.hardware_queue import queue_deadlock
from ds_terapipe.schedule.lower import complete, with_messages
from ds_terapipe.schedule.numbered import Numbered, Problem
from ds_terapipe.schedule.search import _TIMED, search
from tests.schedule import strategies


def attention_cut(placement, micro_batches, slices, share, weight):
    """A step of sequences whose attention is a share of a forward, cut so that slices have equal (1 - a) l + w a (of context)."""
    part, stages = 1 - share, len(placement.stages) // placement.places
    whole = part + weight * share
    root, share = part * part, 2 * weight * share
    ends = [(math.sqrt(root + 2 * share * whole * i / slices) - part) / share for i in range(slices + 1)]
    linear = [part * (b - a) / stages for a, b in itertools.pairwise(ends)]
    context = [share / (2 * weight) * (b * b - a * a) / stages for a, b in itertools.pairwise(ends)]
    factor = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.WEIGHT_GRADIENTS: 0}
    return Problem(placement, [slices] * micro_batches, lambda a: linear[a.unit.slice] + factor[a.op] * context[a.unit.slice])


# attention 30% of a forward: places, micro-batches, slices; time / ideal (1.118 without moves), seconds of the search
BOUNDS = {(8, 2, 8): (1.116, 0.4), (16, 2, 16): (1.14, 0.2)}


@pytest.mark.parametrize("shape", BOUNDS, ids=str)
def test_attention_weighted_steps_come_near_their_ideal_in_the_orders_that_may_be_timed(shape, monkeypatch):
    (places, micro_batches, slices), (most, seconds) = shape, BOUNDS[shape]
    problems = [attention_cut(Placement.v(places), micro_batches, slices, 0.3, weight) for weight in (0.5, 0.25)[: 16 // places]]
    timed, times = [], Numbered.times
    monkeypatch.setattr(Numbered, "times", lambda *args: timed.append(args) or times(*args))
    found = search(problems, seconds=seconds)
    assert found is not None and found.seconds <= most * 3 * micro_batches
    assert len(timed) <= seconds * _TIMED / Numbered(problems[0]).size
    assert places == 16 or search(problems, seconds=seconds) == found


@pytest.mark.parametrize(("micro_batches", "most"), [(8, 1.146), (16, 1.073), (32, 1.0365)])
def test_uncut_steps_of_two_stages_a_place_are_as_good_as_pytorchs_best(micro_batches, most):
    problem = Problem(Placement.v(8), [1] * micro_batches, lambda action: 0.5, limits=[32.0] * 8)  # 8 micro-batches live
    assert (found := search([problem], seconds=0.15)) is not None and found.seconds <= most * 3 * micro_batches


places = st.builds(Placement.interleaved, st.integers(1, 8), st.integers(1, 4)) | st.builds(Placement.v, st.integers(1, 8))


@settings(deadline=None, max_examples=25)
@given(places | strategies.placements(), strategies.few_slices.map(lambda slices: slices[:3]), st.booleans(), st.randoms())
def test_every_searched_order_is_valid_in_the_limit_and_comes_to_its_end(placement, slices, apart, random):
    times: dict[Action, float] = collections.defaultdict(lambda: random.uniform(0.1, 2))
    problem = Problem(placement, slices, times.__getitem__, random.choice([None, lambda action: 0.3]), apart=apart)
    trained = [sum(map(placement.goes_backward, placement.stages_on(p))) for p in range(placement.places)]
    # all of the longest micro-batch, and one unit more
    problem = problem._replace(limits=[2.0 * each * (max(slices) + random.choice([0, 1, 99])) for each in trained])
    if (found := search([problem], seconds=1e-4)) is None and placement.forward_only:
        return  # list scheduling lets such stages run ahead
    assert found is not None
    validate(found.grid, slices, None, placement)
    lowered = complete(found.grid, placement)
    assert replay(lowered, problem.durations(lowered), problem.message, placement).makespan == pytest.approx(found.seconds)
    assert (of := Numbered(problem)).fit(of.rows_of(found.grid))
    text = text_of(found.grid)
    assert grid_from(text) == found.grid == schedule_of(text).order(placement, slices)
    check_text(text, placement, slices)


def test_moves_keep_to_the_limit_and_sends_wait_where_they_would_lock_up():
    problem = attention_cut(Placement.plain(4), 2, 4, 0.6, 1.0)._replace(limits=[13.0] * 4)
    found, of = search([problem], seconds=0.3), Numbered(problem)
    assert found is not None and max(map(of.peak, of.rows_of(found.grid))) <= 13
    assert Numbered(Problem(Placement.plain(2), [1], lambda action: 1.0)).times([[0, 2, 4], [1, 3, 5]]).makespan == 5
    early = [[Action(op, 0, Unit(m, 0)) for op in (Op.FORWARD, Op.BACKWARD) for m in range(8)]]
    early += [[Action(op, 1, Unit(m, 0)) for m in range(8) for op in (Op.FORWARD, Op.BACKWARD)]]
    assert queue_deadlock(complete(early)) == {0: 11, 1: 11}  # 0SEND_F5.0 and 1SEND_B2.0
    assert not queue_deadlock(with_messages(early, None, lambda action: 1.0))


LINES = ("0F0.0 0F0.1 0B0.1 0W0.1 0B0.0 0W0.0", "1F0.0 1F0.1 1B0.1 1B0.0 1W0.0")


@pytest.mark.parametrize(("line", "was", "becomes", "says"), [
    (0, "0B0.1", "0X0.1", "place 0: action: got '0X0.1', must be <stage>"),
    (1, "1F0.0 1F0.1", "1F0.1 1F0.0", "stage 1, 1F0.1: 1F0.1 needs 1F0.0 before it: slices"),
    (0, " 0B0.0 0W0.0", "", "stage 0, end: 0B0.0 is missing"),
    (1, LINES[1], LINES[1] + " 1F1.0", "stage 1, 1F1.0: 1F1.0 names a unit that does not exist"),
])  # fmt: skip
def test_an_order_is_read_as_it_is_written_or_refused_in_one_line(line, was, becomes, says):
    lines = [text.replace(was, becomes) if index == line else text for index, text in enumerate(LINES)]
    with pytest.raises(ValueError, match="^" + says.replace(".", r"\.")) as raised:
        check_text(lines, Placement.plain(2), [2])
    assert "\n" not in str(raised.value)


def test_an_order_leaves_out_slices_that_a_micro_batch_does_not_have():
    grid = schedule_of(LINES).order(Placement.plain(2), [1])
    assert text_of(grid) == ("0F0.0 0B0.0 0W0.0", "1F0.0 1B0.0 1W0.0")
    with pytest.raises(ValueError, match="got 1 lines, must be one for each of 2 places"):
        check_text(LINES[:1], Placement.plain(2), [2])
    with pytest.raises(ValueError, match="no backward pass"):
        check_text(("0F0.0", "1F0.0"), Placement.plain(2), [1])
