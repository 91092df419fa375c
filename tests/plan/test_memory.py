"""Memory of a plan, against a ledger that books every allocation by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan import MemoryModel, StageMemory, memory_use
from ds_terapipe.schedule import EVAL_SENT_KEPT, NAMES, Op, Placement, Unit, order, with_weight_gradients
from tests.schedule import strategies

per_token = st.integers(0, 9).map(float)
stage_memories = st.builds(StageMemory, *[per_token] * 7)


def ledger(model, placement, schedule, lengths, micro_batches, weights_once, place):
    """The most that is held at any action of a place, from what the engine allocates and frees."""
    cut, total, last = len(lengths) > 1, sum(lengths), len(lengths) - 1
    grid = order(schedule, placement, [len(lengths)] * micro_batches)
    row = (with_weight_gradients(grid, placement) if weights_once and cut else grid)[place]
    stages = placement.stages_on(place)
    held, peak = {}, 0.0
    for index, (op, stage, unit) in enumerate(row):
        own, length, m = model.stages[stage], lengths[unit.slice], unit.micro_batch
        trained = placement.goes_backward(stage) and schedule != "forward_only"
        if op is Op.FORWARD:
            held["live", stage, unit] = own.activations * length
            held["kv", stage, m] = own.keys_values * total * cut
        elif op is Op.BACKWARD:
            held["dkv", stage, m] = own.key_value_gradients * total * cut
            held["weights", stage, unit] = own.weight_gradients * length * (weights_once and cut)
            held["in hand"] = own.sent * length * (stage + 1 < len(placement.stages))
            # its gradient has come: the next stage has this unit and all that were sent before it
            sent = [key for key in held if key[:2] == ("out", stage)]
            for key in sent[: next((i + 1 for i, key in enumerate(sent) if key[2] == unit), 0)]:
                del held[key]
        peak = max(peak, sum(held.values()) + posted(model, placement, row, index, stages, lengths))
        if op is Op.FORWARD:
            if placement.sends_forward(stage):
                held["out", stage, unit] = own.sent * length
            if not trained:
                del held["live", stage, unit]
                drop_all_but(held, ("out", stage), EVAL_SENT_KEPT)
                if unit.slice == last:
                    del held["kv", stage, m]
        elif op is Op.BACKWARD:
            del held["live", stage, unit], held["in hand"]
            if placement.sends_backward(stage):
                held["back", stage, unit] = own.received * length
                drop_all_but(held, ("back", stage), model.sent_kept)
            if unit.slice == 0:
                del held["kv", stage, m], held["dkv", stage, m]
        if op is Op.WEIGHT_GRADIENTS:
            for slice_ in range(len(lengths)):
                del held["weights", stage, Unit(m, slice_)]
    return peak + sum(model.stages[stage].fixed for stage in stages)


def drop_all_but(held, kind, count):
    """What was booked last stays."""
    keys = [key for key in held if key[:2] == kind]
    for key in keys[: max(len(keys) - count, 0)]:
        del held[key]


def posted(model, placement, row, index, stages, lengths):
    """Memory that is ready for the next messages while an action runs."""
    bytes_ = 0.0
    for stage in stages:
        own = model.stages[stage]
        for op, size, comes in (
            (Op.FORWARD, own.received, placement.receives_forward(stage)),
            (Op.BACKWARD, own.sent, placement.receives_backward(stage)),
        ):
            to_come = [a.unit for a in row[index + 1 :] if (a.op, a.stage) == (op, stage)]
            bytes_ += comes * sum(size * lengths[unit.slice] for unit in to_come[: model.posted_ahead])
    return bytes_


@settings(deadline=None, max_examples=120)
@given(
    st.data(),
    strategies.placements(),
    st.sampled_from([*NAMES, "forward_only"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0, 1, 3, 8]),
    st.integers(0, 3),
)
def test_the_peak_is_the_ledgers(data, placement, schedule, lengths, micro_batches, weights_once, kept, ahead):
    count = len(placement.stages)
    stages = data.draw(st.lists(stage_memories, min_size=count, max_size=count))
    model = MemoryModel(tuple(stages), ahead, kept)
    uses = memory_use(model, schedule, lengths, micro_batches, weights_once, placement)
    for place, use in enumerate(uses):
        expected = ledger(model, placement, schedule, lengths, micro_batches, weights_once, place)
        assert use.total == pytest.approx(expected)
        assert min(use) >= 0
    if placement.is_plain and not placement.forward_only:
        assert uses == memory_use(model, schedule, lengths, micro_batches, weights_once)


def test_each_line_of_a_forward_only_stage():
    # Slices of 6 and 4 tokens of 8 micro-batches; most is held when a longer slice comes after four that were sent.
    frozen = StageMemory(2.0, 3.0, 5.0, 7.0, received=11.0, sent=13.0, fixed=100.0)
    model = MemoryModel((frozen,) * 3)
    _, use, last = memory_use(model, "1f1b", [6, 4], 8, True, Placement.plain(3, forward_only=2))
    assert use == (100, 12, 30, 0, 0, 11 * 10 + 13 * 20)
    assert last.key_value_gradients == 50 and last.weight_gradients == 70
    assert last.messages == 11 * 10  # posted inputs, and no gradient in either direction
    together = memory_use(model, "1f1b", [6, 4], 8, True, Placement.of([0, 1, 0], forward_only=2))
    assert together[0].fixed == 200 and together[0].total < 200 + use.total + last.total


def test_a_segment_keeps_what_all_its_stages_keep():
    # Two stages on one place, 6 + 4 tokens: the weight gradients of both wait until the first of them went backward.
    model = MemoryModel((StageMemory(weight_gradients=1.0), StageMemory(weight_gradients=10.0)))
    (use,) = memory_use(model, "1f1b", [6, 4], 1, True, Placement.of([0, 0]))
    assert use == (0, 0, 0, 0, 110, 0)


def test_the_placement_must_be_the_models():
    with pytest.raises(ConfigError, match="memory: got 2 stages, must be the pipeline's 3"):
        memory_use(MemoryModel((StageMemory(),) * 2), "1f1b", [1], 1, placement=Placement.of([0, 1, 0]))


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
