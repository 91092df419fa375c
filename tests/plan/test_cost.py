"""Measured costs: the fit, what it refuses, its file; and costs from recorded steps, as they went into a simulated one."""

import json
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.cost import MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.costs.memory import MemoryModel, StageMemory
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.tracing.chrome import MEASURED, Event, events_of
from tests.plan.costs import ExampleCost, sample_points


def measured(total=512, least=8, noise=lambda: 1.0, attention=2e-8):
    cost, points = ExampleCost([1.0], attention=attention), sample_points(total, least)
    return StageCost([Sample(n, c, cost.forward(0, n, c) * noise(), cost.backward(0, n, c) * noise()) for n, c in points])


@pytest.mark.parametrize(("attention", "relative"), [(0.0, 1e-6), (2e-8, 0.02)])  # of the form of the fit; with a square
def test_between_samples_a_cost_is_found(attention, relative):
    cost, fit = ExampleCost([1.0], attention=attention), measured(attention=attention)
    for length, context in ((8, 0), (100, 37), (9, 500), (64, 448), (300, 200), (512, 0)):
        assert fit.forward(length, context) == pytest.approx(cost.forward(0, length, context), rel=relative)
        assert fit.backward(length, context) == pytest.approx(cost.backward(0, length, context), rel=relative)


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False))
def test_more_tokens_or_context_never_take_less_whatever_the_noise(random):
    fit = measured(128, 8, lambda: random.uniform(0.3, 3.0))
    length, context = (grid.astype(float) for grid in np.meshgrid(np.arange(8, 129), np.arange(0, 121)))
    for seconds in (fit.forward(length, context), fit.backward(length, context)):
        assert seconds.shape == length.shape and np.all(seconds >= 0)
        assert np.all(np.diff(seconds, axis=0) >= -1e-15) and np.all(np.diff(seconds, axis=1) >= -1e-15)


@pytest.mark.parametrize(("length", "context"), [(7, 0), (8, 505)])
def test_a_cost_is_not_extrapolated(length, context):
    with pytest.raises(ConfigError, match=f"got a slice of {length} tokens after {context}, must be within the measured 8 to"):
        measured().forward(length, context)
    with pytest.raises(ConfigError, match="must be within the measured"):
        measured().backward(np.array([16.0, length]), np.array([0.0, context]))


def pipeline():
    stages = [StageCost(measured().samples, [(512, 0.25), (256, 0.125)], f"stage {i}") for i in range(2)]
    memory = MemoryModel((StageMemory(activations=10.0, sent=4.0), StageMemory(received=4.0, fixed=1e6)), 2, 4)
    return MeasuredCost(stages, [[(1, 1e-4), (519, 2e-4)]], 3, {"model": "gpt", "dtype": "float32"}, memory)


def test_a_saved_measurement_is_the_same(tmp_path):
    (cost := pipeline()).save(tmp_path / "costs.json")
    again = MeasuredCost.load(tmp_path / "costs.json")
    assert again.to_dict() == cost.to_dict() and again.memory == cost.memory
    assert (again.stages, again.sequences, again.min_length, again.max_length) == (2, 3, 8, 512)
    assert again.measured_on == {"model": "gpt", "dtype": "float32"}
    assert again.forward(1, 64, 100) == cost.forward(1, 64, 100)
    assert again.weights(0, 384) == pytest.approx(0.1875) and again.message(0, 260) == pytest.approx(1.5e-4)
    assert StageCost(measured().samples).weights(512) == 0
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        MeasuredCost.load(tmp_path / "none.json")


TOO_FEW = r"messages\[0\].points: got .*, must be of at least one token and from 8 to 512"
BROKEN = [
    (lambda d: json.dumps(d)[:-40], "is no JSON .*must be a measurement and whole, write it again"),
    (lambda d: d.pop("format") and None, 'format: got null, must be "ds_terapipe costs 1"'),
    (lambda d: d.pop("stages") and None, "stages: missing, must be a list of at least 1 objects"),
    (lambda d: d["stages"][1]["samples"].append([8, 0, 1.0]),
     r"stages\[1\].samples\[\d+\]: got \[8, 0, 1.0\], must be \[length, context, forward, backward\]"),
    (lambda d: d["stages"][0].update(samples=[[8, 8, 1, 1]]),
     r"stages\[0\].samples: costs of stage 0: got no measurement without context"),
    (lambda d: d["stages"][0].update(weights=[[256, 0.1]]), r"stages\[0\].weights: got .*, must be of .* up to 512"),
    (lambda d: d["messages"][0].update(points=[[8, 1e-4], [256, 2e-4]]), TOO_FEW),
    (lambda d: d.update(layers=[]), "layers: got"),
    (lambda d: d.update(layers={"stages": [[1.0], [1.0, 2.0]]}), "layers.ends: "),
    (lambda d: d.update(layers={"stages": [[1.0], [-1.0]], "ends": [0, 0]}), "layers.stages"),
    # the last stage has no layer but the end
    (lambda d: d.update(layers={"stages": [[1.0, 1.0], [1.0]], "ends": [0, 1]}), "layers.ends: "),
    (lambda d: d.update(layers={"stages": [[1.0, 1.0]], "ends": [1, 1]}, stages=d["stages"][:1], messages=[], memory=None),
     "layers.ends: "),
    (lambda d: d["memory"]["stages"][0].pop("sent") and None, r"memory.stages\[0\].sent: missing, must be a number"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BROKEN)
def test_a_broken_file_is_one_line_with_file_and_field(tmp_path, change, says):
    path, data = tmp_path / "costs.json", pipeline().to_dict()
    path.write_text(change(data) or json.dumps(data))
    with pytest.raises(ConfigError, match=says) as raised:
        MeasuredCost.load(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


TOTAL, STAGES = 64, 2
TRIALS = [(4,) * 16, (8,) * 8, (16,) * 4, (32, 32), (64,)]


class WithLoss(ExampleCost):
    """On the last stage a loss takes 3 ms forward, and twice as long backward, with the slice that ends a sequence."""

    def forward(self, stage, length, context):
        return super().forward(stage, length, context) + 0.003 * (stage == STAGES - 1) * (np.add(length, context) == TOTAL)


def truth(kind=ExampleCost, **options):
    return kind([1.0, 2.0], linear=2e-4, attention=2e-7, **options)


def recorded(truth, schedule="1f1b", micro_batches=1, once=False, trials=TRIALS):
    times, steps = StepTimes(truth, STAGES, micro_batches, once), []
    for number, slices in enumerate(trials):
        simulation = times.simulate(schedule, slices)
        events = [e._replace(run=MEASURED, step=number) for e in events_of(simulation.grid, simulation.intervals)]
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


def test_the_loss_of_the_whole_is_no_cost_of_a_slice():
    cost = learn(recorded(truth(WithLoss)), whole=True)
    assert cost.loss == pytest.approx((0.003, 0.006), rel=0.05)
    agree(cost, truth(WithLoss), relative=0.02)
    assert learn(recorded(truth(WithLoss))).loss == (0, 0)
    assert cost.of_length(32).forward(1, 16.0, 16.0) - cost.forward(1, 16.0, 16.0) == pytest.approx(0.0015, rel=0.05)


def test_other_cuts_are_predicted():
    real = truth(weights=2e-4, link=5e-5)
    cost = learn(recorded(real, micro_batches=2, once=True), once=True)
    agree(cost, real)
    assert cost.weights(1, 16) == pytest.approx(real.weights(1, 16), rel=1e-6)
    for slices in ((24, 20, 20), (8,) * 8, (40, 24), (64,)):
        predicted, true = (StepTimes(c, STAGES, 2, True).seconds("1f1b", slices) for c in (cost, real))
        assert predicted == pytest.approx(true, rel=0.01), slices


def test_noise_that_hits_one_of_four_repeats_does_not_count():
    late = []
    for number, step in enumerate(recorded(truth(), trials=TRIALS * 4)):
        slow = 3.0 if number < len(TRIALS) else 1.0
        late.append(step._replace(events=[e._replace(start=e.start * slow, end=e.end * slow) for e in step.events]))
    agree(learn(late), truth())


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
    # a length that no stage waited for takes as long as the nearest one
    ready = [e._replace(start=e.end - 0.01) if e.kind.startswith("RECV") else e for e in step.events]
    longer = measured_cost([step, step._replace(slices=(16,), events=ready)], 2, 1, False, False, {})
    assert longer.message(0, 16.0) == longer.message(0, 8.0) == pytest.approx(cost.message(0, 8.0))
    assert overhead([step]) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="stage 1: got no recorded slice"):
        learn([step._replace(events=[e for e in step.events if e.stage == 0])])
