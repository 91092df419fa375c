"""Costs from recorded steps: what went into a simulated step comes out of its events."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.tracing.chrome import MEASURED, Event, events_of

TOTAL, STAGES = 64, 2
TRIALS = [(4,) * 16, (8,) * 8, (16,) * 4, (32, 32), (64,)]


class Truth:
    sequences, max_length = 1, TOTAL

    def __init__(self, weights: float = 0.0, message: float = 0.0, loss: tuple[float, float] = (0.0, 0.0)) -> None:
        self._weights, self._message, self._loss = weights, message, loss

    def _at(self, stage, length, context, factor, which):
        length, context = np.asarray(length, float), np.asarray(context, float)
        plain = factor * (1 + stage) * (1e-3 + 2e-4 * length + 1e-6 * length * context)
        last = (stage == STAGES - 1) & (length + context == TOTAL)
        return plain + np.where(last, self._loss[which], 0.0)

    def forward(self, stage, length, context):
        return self._at(stage, length, context, 1, 0)

    def backward(self, stage, length, context):
        return self._at(stage, length, context, 2, 1)

    def weights(self, stage, length):
        return self._weights * length / TOTAL

    def message(self, boundary, length):
        return self._message * np.ones_like(np.asarray(length, float))


def recorded(truth, schedule="1f1b", micro_batches=1, once=False, trials=TRIALS):
    times, steps = StepTimes(truth, STAGES, micro_batches, once), []
    for number, slices in enumerate(trials):
        simulation = times.simulate(schedule, slices)
        events = [e._replace(run=MEASURED) for e in events_of(simulation.grid, simulation.intervals, step=number)]
        steps.append(RecordedStep(slices, events, simulation.makespan + 0.05))
    return steps


def learn(steps, once=False, whole=False):
    return measured_cost(steps, STAGES, 1, once, whole, {"model": "none"})


def agree(cost, truth, relative=1e-6):
    spans = [span for slices in TRIALS for span in zip(slices, [0, *accumulate(slices)], strict=False)]
    for stage in range(STAGES):
        for length, context in spans:
            for found, true in ((cost.forward, truth.forward), (cost.backward, truth.backward)):
                wanted = pytest.approx(float(true(stage, length, context)), rel=relative)
                assert found(stage, float(length), float(context)) == wanted


@pytest.mark.parametrize(("schedule", "micro_batches"), [("1f1b", 1), ("1f1b", 3), ("terapipe", 3)])
def test_slices_cost_what_they_took(schedule, micro_batches):
    steps = recorded(Truth(), schedule, micro_batches)
    agree(learn(steps), Truth())
    assert overhead(steps) == pytest.approx(0.05)


def test_weight_gradients_are_apart_and_in_the_backward_of_an_uncut_sequence():
    truth = Truth(weights=0.02)
    cost = learn(recorded(truth, once=True), once=True)
    agree(cost, truth)
    for stage in range(STAGES):
        assert cost.weights(stage, 64.0) == pytest.approx(0.02)
        assert cost.weights(stage, 32.0) == pytest.approx(0.01, rel=0.05)


def test_a_message_takes_what_a_waiting_stage_waited_for_it():
    truth = Truth(message=0.004)
    cost = learn(recorded(truth))
    agree(cost, truth)
    assert [cost.message(0, float(n)) for n in (4, 16, 64)] == pytest.approx([0.004] * 3)


def test_the_loss_of_the_whole_is_no_cost_of_a_slice():
    truth = Truth(loss=(0.003, 0.006))
    cost = learn(recorded(truth), whole=True)
    assert cost.loss == pytest.approx((0.003, 0.006), rel=0.05)
    agree(cost, truth, relative=0.02)


def test_other_cuts_are_predicted():
    truth = Truth(weights=0.01, message=0.002)
    cost = learn(recorded(truth, micro_batches=2, once=True), once=True)
    for slices in ((24, 20, 20), (8,) * 8, (40, 24), (64,)):
        predicted, true = (StepTimes(c, STAGES, 2, True).seconds("1f1b", slices) for c in (cost, truth))
        assert predicted == pytest.approx(true, rel=0.01), slices


def test_noise_that_hits_one_of_four_repeats_does_not_count():
    late = []
    for number, step in enumerate(recorded(Truth(), trials=TRIALS * 4)):
        slow = 3.0 if number < len(TRIALS) else 1.0
        late.append(step._replace(events=[e._replace(start=e.start * slow, end=e.end * slow) for e in step.events]))
    agree(learn(late), Truth())


def test_sending_belongs_to_the_slice_and_collectives_to_the_step():
    rows = [
        (0, "0F0.0", "F", 0.0, 1.0), (0, "0SEND_F0.0", "SEND_F", 1.0, 1.2), (0, "0RECV_B0.0", "RECV_B", 1.25, 4.0),
        (0, "0B0.0", "B", 4.0, 6.0), (0, "optimiser", "optimiser", 6.0, 7.0), (1, "1RECV_F0.0", "RECV_F", 0.0, 1.5),
        (1, "1F0.0", "F", 1.5, 2.0), (1, "1B0.0", "B", 2.0, 3.0), (1, "1SEND_B0.0", "SEND_B", 3.0, 3.1),
    ]  # fmt: skip
    step = RecordedStep((8,), [Event(MEASURED, stage, stage, 1, *row) for stage, *row in rows], 8.0)
    cost = measured_cost([step], 2, 1, False, False, {})
    assert cost.stage_costs[0].samples[0] == (8, 0, pytest.approx(1.25), pytest.approx(2.0))
    assert cost.stage_costs[1].samples[0] == (8, 0, pytest.approx(0.5), pytest.approx(1.1))
    # from the end of a send to the end of its receive
    assert cost.message(0, 8.0) == pytest.approx((0.3 + 0.9) / 2, rel=0.3)
    assert overhead([step]) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="stage 1: got no recorded slice"):
        learn([step._replace(events=[e for e in step.events if e.stage == 0])])
