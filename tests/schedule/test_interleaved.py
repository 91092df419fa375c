"""Interleaved 1F1B: a complete order, and its published time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe.schedule import Action, Op, Unit
from ds_terapipe.schedule.interleaved import interleaved_order, run_interleaved

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))


def times(chunks: int) -> Callable[[Action], float]:
    return lambda action: (1.0 if action.op is Op.FORWARD else 2.0) / chunks


@given(SIZES)
def test_every_chunk_of_every_micro_batch_once(sizes: tuple[int, int, int]) -> None:
    devices, chunks, groups = sizes
    for device, row in enumerate(interleaved_order(devices, chunks, groups * devices)):
        for op in (Op.FORWARD, Op.BACKWARD):
            expected = {
                Action(op, chunk * devices + device, Unit(m, 0))
                for chunk in range(chunks)
                for m in range(groups * devices)
            }
            ran = [action for action in row if action.op is op]
            assert set(ran) == expected and len(ran) == len(expected)


@given(SIZES)
def test_the_bubble_is_that_of_1f1b_divided_by_the_chunks(sizes: tuple[int, int, int]) -> None:
    # Narayanan et al. 2021, section 2.2.2: (K - 1) (t_f + t_b) / v beside the ideal M (t_f + t_b)
    devices, chunks, groups = sizes
    run = run_interleaved(devices, chunks, groups * devices, times(chunks))
    assert run.makespan == pytest.approx(3 * groups * devices + 3 * (devices - 1) / chunks, rel=1e-9)
    assert run.bubble == pytest.approx(1 - 3 * groups * devices / run.makespan, abs=1e-9)


@given(SIZES, st.floats(0.0, 2.0))
def test_spans_respect_order_inputs_and_messages(sizes: tuple[int, int, int], link: float) -> None:
    devices, chunks, groups = sizes
    run = run_interleaved(devices, chunks, groups * devices, times(chunks), lambda action: link)
    spans = {a: s for row, own in zip(run.grid, run.spans, strict=True) for a, s in zip(row, own, strict=True)}
    for own in run.spans:
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(own))
    wait = link if devices > 1 else 0.0
    for (op, stage, unit), span in spans.items():
        source = Action(op, stage - 1, unit) if op is Op.FORWARD else Action(op, stage + 1, unit)
        if source in spans:
            assert span.start >= spans[source].end + wait - 1e-9
        if op is Op.BACKWARD:
            assert span.start >= spans[Action(Op.FORWARD, stage, unit)].end - 1e-12


def test_messages_of_one_channel_follow_each_other() -> None:
    slow = run_interleaved(2, 2, 2, times(2), lambda action: 10.0)
    arrivals = sorted(
        span.start
        for action, span in zip(slow.grid[1], slow.spans[1], strict=True)
        if action.op is Op.FORWARD and action.stage == 1
    )
    assert arrivals == [10.5, 20.5]


def test_live_chunks() -> None:
    run = run_interleaved(4, 2, 8, times(2))
    # warm-up of 2 (K - d - 1) + (v - 1) K, and the one in hand
    assert run.peak_units == (11, 9, 7, 5)


@pytest.mark.parametrize(("devices", "chunks", "micro_batches"), [(4, 2, 6), (0, 1, 1), (2, 0, 2)])
def test_wrong_sizes(devices: int, chunks: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match="a multiple of the devices"):
        interleaved_order(devices, chunks, micro_batches)
