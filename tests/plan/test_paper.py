"""Figures that the TeraPipe paper published, and the cost model's predictions of them."""

import dataclasses
import json
import math

import numpy as np
import pytest

from ds_terapipe import cli
from ds_terapipe.plan.costs.hardware import CLUSTERS, Rates
from ds_terapipe.plan.paper import predicted as paper
from ds_terapipe.plan.paper.predicted import layout_cost, reproduce, simulated
from ds_terapipe.plan.paper.published import CALIBRATED, figures

PUBLISHED = figures()
KNOWN = CLUSTERS["p3.16xlarge"]
MIDDLE = np.log([known.middle for known in KNOWN.ranges.values()])
WIDTHS = np.array([np.log(known.high / known.low) / 2 for known in KNOWN.ranges.values()])  # of the logarithms
NOISE = 0.05  # relative error expected of a time: scatter of the measurement, and what the formula leaves out


def closed_form(figure, rates):
    """Seconds of a step by the paper's formula, sum t + (K - 1) max t, and the part after the last backward.

    With a maximum for forward and for backward it is exact for equal stages in the order ``terapipe``.
    """
    setting = figure.setting
    cost, length = layout_cost(setting, rates), np.array(figure.slices, dtype=float)
    context = np.cumsum(length) - length
    passes = (cost.forward(0, length, context), cost.backward(0, length, context))
    flow = sum(figure.sequences * np.sum(seconds) + (setting.stages - 1) * np.max(seconds) for seconds in passes)
    return float(flow) + cost.step_overhead(setting.data_parallel)


@pytest.fixture(scope="module")
def result():
    return reproduce()


def published(setting, kind):
    return next(f.published_s for f in PUBLISHED if (f.setting.number, f.kind, f.seq_length) == (setting, kind, 2048))


def test_published_times_agree_with_the_printed_speedups():
    ratios = [round(published(n, "without") / published(n, "with"), 2) for n in range(1, 11)]
    assert ratios == [1.21, 1.0, 1.0, 1.39, 1.40, 1.88, 1.56, 2.40, 6.75, 5.02]


def test_no_time_that_calibrates_is_of_the_papers_own_slices():
    chosen = [index for index, figure in enumerate(PUBLISHED) if figure.calibrates]
    assert len(chosen) == 7
    for figure in (PUBLISHED[index] for index in chosen):
        # Nor a time that is printed a second time, as the paper's own choice of slices.
        twins = [f for f in PUBLISHED if f.kind == "with" and f.slices == figure.slices and f.setting == figure.setting]
        assert figure.setting.number != 10 and not twins


def improbability(logs):
    """Of rates, by the times that calibrate: each logarithm has a normal prior in its range, each time's a normal error."""
    rates = Rates(**dict(zip(KNOWN.ranges, np.exp(logs).tolist(), strict=True)))
    errors = [math.log(closed_form(figure, rates) / figure.published_s) for figure in PUBLISHED if figure.calibrates]
    return float(np.sum(np.square(errors)) / NOISE**2 + np.sum(((logs - MIDDLE) / WIDTHS) ** 2))


def test_the_calibrated_rates_are_the_most_likely_ones():
    """The sum of squares is least here."""
    logs = np.log([*dataclasses.asdict(CALIBRATED).values()])

    def slopes(at):
        return np.array([improbability(at + step) - improbability(at - step) for step in 1e-5 * np.diag(WIDTHS)])

    assert np.abs(slopes(logs)).max() < 1e-3 * np.abs(slopes(MIDDLE)).max()
    # Two standard deviations of the prior; the times would rather be fitted exactly.
    assert 0.1 < np.abs((logs - MIDDLE) / WIDTHS).max() < 2


@pytest.mark.parametrize("index", range(0, len(PUBLISHED), 4))
def test_the_simulator_agrees_with_the_closed_form(index):
    assert simulated(PUBLISHED[index], CALIBRATED) == pytest.approx(closed_form(PUBLISHED[index], CALIBRATED), rel=1e-9)


def test_held_out_times_and_setting_10_are_predicted(result):
    held_out = [each for each in result.figures if each["source"] == "read" and not each["calibration"]]
    logs = [abs(math.log(each["simulated_s"] / each["published_s"])) for each in held_out]
    assert len(logs) == 22 and result.held_out_mean_error == pytest.approx(sum(logs) / 22) and sum(logs) / 22 <= 0.08
    tenth = result.settings[9]
    assert tenth["setting"] == 10 and tenth["speedup_simulated"] == pytest.approx(5.822 / 1.160, rel=0.10)


def test_own_plans_are_never_slower_than_the_papers(result):
    theirs = {each["setting"]: each["simulated_s"] for each in result.figures if each["kind"] == "with"}
    gains = [theirs[each["setting"]] / each["own_best_s"] for each in result.settings]
    assert min(gains) >= 1 and max(gains) > 1.01
    assert all(sum(each["own_best_slices"]) == 2048 for each in result.settings)


def test_the_command_prints_the_table_and_the_same_figures_without_calibration(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(paper, "simulated", closed_form)  # equal, by the test above, and quick
    arguments = ["reproduce-paper", "--uncalibrated", "--granularity", "64", "--json", str(tmp_path / "paper.json")]
    assert cli.main(arguments) == 0
    data, out = json.loads((tmp_path / "paper.json").read_text()), capsys.readouterr().out
    assert len(data["figures"]) == 35 and not any(figure["calibration"] for figure in data["figures"])
    assert all(f"{figure['simulated_s']:.3f} s" in out for figure in data["figures"])
    assert all(f"{entry['speedup_simulated']:.2f}x" in out for entry in data["settings"])
    assert f"simulated / published)|: {data['held_out_mean_error']:.3f} over the 29 times" in out
