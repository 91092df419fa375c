"""Memory of a plan, against a ledger that books every allocation by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.plan import MemoryModel, StageMemory, memory_use
from ds_terapipe.plan.costs.memory import Peaks, calibrated
from ds_terapipe.schedule import EVAL_SENT_KEPT, NAMES, Op, Unit, order, with_weight_gradients
from tests.schedule import strategies

stage_memories = st.builds(StageMemory, *[st.integers(0, 9).map(float)] * 10)
lengths_of_slices = st.lists(st.integers(1, 9), min_size=1, max_size=4)


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
        ahead = posted(model, placement, row, index, stages, lengths)
        if op is Op.FORWARD:
            held["live", stage, unit] = own.activations * length
            held["kv", stage, m] = own.keys_values * total * cut
        elif op is Op.BACKWARD:
            held["in hand"] = own.sent * length * (stage + 1 < len(placement.stages))
            held["gradient"] = own.largest_gradient * (not (weights_once and cut))
            # its gradient has come: the next stage has this unit and all that were sent before it
            sent = [key for key in held if key[:2] == ("out", stage)]
            for key in sent[: next((i + 1 for i, key in enumerate(sent) if key[2] == unit), 0)]:
                del held[key]
        if op is Op.WEIGHT_GRADIENTS:
            held["gradient"] = own.largest_gradient
        else:
            held["working"] = own.working * length + own.joined * total * cut
        if op is Op.BACKWARD:  # what its layers leave comes as their activations go
            peak = max(peak, sum(held.values()) + ahead)
            del held["live", stage, unit]
            held["dkv", stage, m] = own.key_value_gradients * total * cut
            held["weights", stage, unit] = own.weight_gradients * length * (weights_once and cut)
        peak = max(peak, sum(held.values()) + ahead)
        held.pop("working", None)
        held.pop("gradient", None)
        if op is Op.FORWARD:
            if placement.sends_forward(stage):
                held["out", stage, unit] = own.sent * length
            if not trained:
                del held["live", stage, unit]
                drop_all_but(held, ("out", stage), EVAL_SENT_KEPT)
                if unit.slice == last:
                    del held["kv", stage, m]
        elif op is Op.BACKWARD:
            del held["in hand"]
            if placement.sends_backward(stage):
                held["back", stage, unit] = own.received * length
                drop_all_but(held, ("back", stage), model.sent_kept)
            if unit.slice == 0:
                del held["kv", stage, m], held["dkv", stage, m]
        else:
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
    st.data(), strategies.placements(), st.sampled_from([*NAMES, "forward_only"]), lengths_of_slices,
    st.integers(1, 4), st.booleans(), st.sampled_from([0, 1, 3, 8]), st.integers(0, 3),
)  # fmt: skip
def test_the_peak_is_the_ledgers(data, placement, schedule, lengths, micro_batches, weights_once, kept, ahead):
    count = len(placement.stages)
    stages = data.draw(st.lists(stage_memories, min_size=count, max_size=count))
    model = MemoryModel(tuple(stages), ahead, kept)
    uses = memory_use(model, schedule, lengths, micro_batches, weights_once, placement)
    for place, use in enumerate(uses):
        expected = ledger(model, placement, schedule, lengths, micro_batches, weights_once, place)
        assert use.total == pytest.approx(expected) and min(use) >= 0
    if placement.is_plain and not placement.forward_only:
        assert uses == memory_use(model, schedule, lengths, micro_batches, weights_once)


@settings(deadline=None, max_examples=60)
@given(
    st.data(), strategies.placements(), st.sampled_from(NAMES), lengths_of_slices, st.integers(1, 4), st.booleans()
)  # fmt: skip
def test_the_step_that_was_measured_takes_what_was_measured(
    data, placement, schedule, lengths, micro_batches, weights_once
):
    stages = data.draw(st.lists(stage_memories, min_size=len(placement.stages), max_size=len(placement.stages)))
    model = MemoryModel(tuple(replace(stage, working=0.0, joined=0.0) for stage in stages))
    how = (schedule, micro_batches, weights_once, placement)

    def told(model):
        return [use.total for use in memory_use(model, schedule, lengths, *how[1:])]

    peaks = [total + data.draw(st.integers(0, 50)) for total in told(model)]
    found = told(calibrated(model, [Peaks(tuple(lengths), tuple(peaks))], *how))
    for peak, before, after in zip(peaks, told(model), found, strict=True):
        assert before - 1e-6 <= after <= peak + 1e-6, "at most what was taken: the peak may be with a shorter slice"
        if placement.is_plain and len(set(lengths)) == 1 and not any(stage.largest_gradient for stage in stages):
            assert after == pytest.approx(peak)
    assert calibrated(model, [Peaks(tuple(lengths), (0.0,) * len(peaks))], *how) == model


@given(
    st.integers(0, 9), st.integers(0, 9), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=4, unique=True)
)
def test_two_steps_tell_what_grows_with_slices_from_what_does_not(working, joined, counts):
    bare = MemoryModel((StageMemory(activations=1.0),) * 2)
    truth = MemoryModel((replace(bare.stages[0], working=float(working), joined=float(joined)),) * 2)
    measured = []
    for count in counts:
        lengths = (64 // count,) * count
        measured.append(Peaks(lengths, tuple(use.total for use in memory_use(truth, "1f1b", lengths, 1))))
    for one in calibrated(bare, measured, "1f1b", 1).stages:
        assert (one.working, one.joined) == pytest.approx((working, joined), abs=1e-9)


@pytest.mark.parametrize("length", [777, 2500, 1024])
def test_the_same_slices_twice_say_no_more_than_once(length):
    bare, lengths = MemoryModel((StageMemory(activations=1.0),)), (length // 3, length - length // 3)
    taken = Peaks(lengths, (5000.0,))
    (twice,) = calibrated(bare, [taken, taken._replace(peaks=(5000.1,))], "1f1b", 1).stages
    assert twice.joined == 0.0 and twice.working == pytest.approx((5000.05 - length) / max(lengths), rel=1e-6)
