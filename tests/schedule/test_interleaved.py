"""Interleaved 1F1B: a complete order, and its published time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.schedule import (
    Action,
    Op,
    Placement,
    Simulation,
    Unit,
    order,
    peak_live_units,
    simulate,
    validate,
    with_messages,
)

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))


def times(chunks: int) -> Callable[[Action], float]:
    return lambda action: (1.0 if action.op is Op.FORWARD else 2.0) / chunks


def run(places: int, chunks: int, micro_batches: int, link: float = 0.0) -> Simulation:
    placement = Placement.interleaved(places, chunks)
    grid = order("interleaved", placement, [1] * micro_batches)
    return simulate(grid, times(chunks), lambda action: link, placement=placement)


@given(SIZES, st.integers(0, 3))
def test_every_chunk_of_every_micro_batch_once(sizes: tuple[int, int, int], frozen: int) -> None:
    places, chunks, groups = sizes
    placement = Placement.interleaved(places, chunks, forward_only=min(frozen, places * chunks - 1))
    slices = [1] * (groups * places)
    grid = order("interleaved", placement, slices)
    validate(grid, slices, "interleaved", placement)
    validate(with_messages(grid, placement), slices, "interleaved", placement)


@given(SIZES)
def test_the_bubble_is_that_of_1f1b_divided_by_the_chunks(sizes: tuple[int, int, int]) -> None:
    # Narayanan et al. 2021, section 2.2.2: (K - 1) (t_f + t_b) / v beside the ideal M (t_f + t_b)
    places, chunks, groups = sizes
    found = run(places, chunks, groups * places)
    assert found.makespan == pytest.approx(3 * groups * places + 3 * (places - 1) / chunks, rel=1e-9)
    assert found.bubble == pytest.approx(1 - 3 * groups * places / found.makespan, abs=1e-9)


@given(SIZES, st.floats(0.0, 2.0))
def test_spans_respect_order_inputs_and_messages(sizes: tuple[int, int, int], link: float) -> None:
    places, chunks, groups = sizes
    found = run(places, chunks, groups * places, link)
    intervals = {
        a: s for row, own in zip(found.grid, found.intervals, strict=True) for a, s in zip(row, own, strict=True)
    }
    for own in found.intervals:
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(own))
    wait = link if places > 1 else 0.0
    for (op, stage, unit), interval in intervals.items():
        source = Action(op, stage - 1, unit) if op is Op.FORWARD else Action(op, stage + 1, unit)
        if op.is_compute and source in intervals:
            assert interval.start >= intervals[source].end + wait - 1e-9
        if op is Op.BACKWARD:
            assert interval.start >= intervals[Action(Op.FORWARD, stage, unit)].end - 1e-12


def test_messages_of_one_link_follow_each_other() -> None:
    slow = run(2, 2, 2, 10.0)
    arrivals = [
        interval.start
        for action, interval in zip(slow.grid[1], slow.intervals[1], strict=True)
        if action.op is Op.FORWARD and action.stage == 1
    ]
    assert sorted(arrivals) == [10.5, 20.5]


def test_live_chunks() -> None:
    # warm-up of 2 (K - d - 1) + (v - 1) K, and the one in hand
    assert tuple(place.peak_units for place in run(4, 2, 8).places) == (11, 9, 7, 5)
    assert peak_live_units("interleaved", Placement.interleaved(4, 2), [1] * 8) == [11, 9, 7, 5]
    assert peak_live_units("interleaved", Placement.interleaved(4, 2, forward_only=4), [1] * 8) == [8, 8, 7, 5]


def test_first_actions_of_a_known_row() -> None:
    grid = order("interleaved", Placement.interleaved(2, 2), [1] * 4)
    assert grid[0][:8] == [Action(Op.FORWARD, stage, Unit(m, 0)) for stage, m in [(0, 0), (0, 1), (2, 0), (2, 1)]] + [
        Action.from_text(text) for text in ("0F2.0", "2B0.0", "0F3.0", "2B1.0")
    ]


@pytest.mark.parametrize(
    ("placement", "slices", "message"),
    [
        (Placement.interleaved(4, 2), [1] * 6, "micro-batches a multiple of the 4 places"),
        (Placement.interleaved(2, 2), [2, 2], "must be one each"),
        (Placement.interleaved(2, 2), [], "must be one each"),
        (Placement.of([0, 1, 1, 0]), [1, 1], r"got stages on places \[0, 1, 1, 0\], must be on 0, 1, ... 1 in turn"),
        (Placement.of([0, 1, 0]), [1, 1], "use Placement.interleaved"),
    ],
)
def test_wrong_sizes(placement: Placement, slices: list[int], message: str) -> None:
    for function in (order, peak_live_units):
        with pytest.raises(ValueError, match=message):
            function("interleaved", placement, slices)
