"""Memory of a plan, against a ledger that books every allocation by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.plan import MemoryModel, StageMemory, memory_use
from ds_terapipe.schedule import NAMES, Op, order

per_token = st.integers(0, 9).map(float)
stage_memories = st.builds(StageMemory, *[per_token] * 7)


def ledger(model, schedule, lengths, micro_batches, weights_once, stage):
    """The most that is held at any action of a stage, from what the engine allocates and frees."""
    own, total = model.stages[stage], sum(lengths)
    row = order(schedule, len(model.stages), [len(lengths)] * micro_batches)[stage]
    order_of = {op: [a.unit for a in row if a.op is op] for op in (Op.FORWARD, Op.BACKWARD)}
    held, out, back, peak = {}, {}, [], own.fixed
    for op, _, unit in row:
        length, m = lengths[unit.slice], unit.micro_batch
        if op is Op.FORWARD:
            held["live", unit] = own.activations * length
            if len(lengths) > 1:
                held["kv", m] = own.keys_values * total
        elif len(lengths) > 1:
            held["gradients", m] = own.key_value_gradients * total
            held["weights", m, unit.slice] = own.weight_gradients * length * weights_once
        in_hand = own.sent * length if op is Op.BACKWARD else 0
        posted = 0.0
        for direction, size in ((Op.FORWARD, own.received), (Op.BACKWARD, own.sent)):
            units = order_of[direction]
            seen = row.index(next(a for a in row if a.unit == unit and a.op is op))
            taken = sum(a.op is direction for a in row[: seen + 1])
            posted += sum(size * lengths[u.slice] for u in units[taken : taken + model.posted_ahead])
        if op is Op.BACKWARD:  # its gradient has come: the next stage has this unit and all that were sent before it
            out = {
                u: size for u, size in out.items() if order_of[op.FORWARD].index(u) > order_of[op.FORWARD].index(unit)
            }
        peak = max(peak, own.fixed + sum(held.values()) + sum(out.values()) + sum(back) + posted + in_hand)
        if op is Op.FORWARD:
            out[unit] = length * own.sent
        if op is Op.BACKWARD:
            back = [*back, length * own.received]
            back = back[max(len(back) - model.sent_kept, 0) :]
            del held["live", unit]
            if unit.slice == 0 and len(lengths) > 1:
                del held["kv", m], held["gradients", m]
                for s in range(len(lengths)):
                    del held["weights", m, s]
    return peak


@settings(deadline=None, max_examples=80)
@given(
    st.lists(stage_memories, min_size=1, max_size=4),
    st.sampled_from(NAMES),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0, 1, 3, 8]),
    st.integers(0, 3),
)
def test_the_peak_is_the_ledgers(stages, schedule, lengths, micro_batches, weights_once, kept, ahead):
    model = MemoryModel(tuple(stages), ahead, kept)
    uses = memory_use(model, schedule, lengths, micro_batches, weights_once)
    for stage, use in enumerate(uses):
        assert use.total == pytest.approx(ledger(model, schedule, lengths, micro_batches, weights_once, stage))
        assert min(use) >= 0


def test_each_line_of_a_small_plan():
    # One stage of one, one micro-batch of 6 + 4 tokens: most is held when the first slice goes backward, the second's is done.
    model = MemoryModel((StageMemory(2.0, 3.0, 5.0, 7.0, fixed=100.0),))
    (use,) = memory_use(model, "1f1b", [6, 4], 1, weights_once=True)
    assert use == (100, 12, 30, 50, 70, 0)
    assert use.total == 262
    (per_slice,) = memory_use(model, "1f1b", [6, 4], 1)
    assert per_slice.weight_gradients == 0
    (whole,) = memory_use(model, "1f1b", [10], 1, weights_once=True)
    assert whole == (100, 20, 0, 0, 0, 0)


@pytest.mark.parametrize(("schedule", "slices", "live"), [("1f1b", 4, 2.75), ("terapipe", 4, 32), ("1f1b", 1, 8)])
def test_activations_of_the_first_of_eight_stages(schedule, slices, live):
    model = MemoryModel((StageMemory(activations=1.0),) * 8)
    uses = memory_use(model, schedule, [2048 // slices] * slices, 32)
    assert uses[0].activations == live * 2048


def test_messages_are_bounded_whatever_the_batch():
    stages = (StageMemory(sent=1.0), StageMemory(received=1.0))
    first, second = (memory_use(MemoryModel(stages), "1f1b", [8, 8], m) for m in (8, 16))
    assert [use.messages for use in first] == [use.messages for use in second]
