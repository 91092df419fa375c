"""Figures that the TeraPipe paper published, and the cost model's predictions of them."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from ds_terapipe import cli
from ds_terapipe.plan.costs.hardware import CLUSTERS
from ds_terapipe.plan.paper import predicted as paper
from ds_terapipe.plan.paper.predicted import CALIBRATING, Options, calibration_set, closed_form, reproduce, simulated
from ds_terapipe.plan.paper.published import figures

PUBLISHED = figures()
RATES = CLUSTERS["p3.16xlarge"].rates


@pytest.fixture(scope="module")
def result():
    return reproduce(Options())


def published(setting, kind):
    return next(f.published_s for f in PUBLISHED if (f.setting.number, f.kind, f.seq_length) == (setting, kind, 2048))


def test_published_times_agree_with_the_printed_speedups():
    ratios = [round(published(n, "without") / published(n, "with"), 2) for n in range(1, 11)]
    assert ratios == [1.21, 1.0, 1.0, 1.39, 1.40, 1.88, 1.56, 2.40, 6.75, 5.02]


def test_the_papers_own_slices_and_setting_10_never_calibrate():
    chosen = [PUBLISHED[index] for index in calibration_set(PUBLISHED)]
    assert len(chosen) == CALIBRATING == 7
    for figure in chosen:
        assert figure.source == "read" and len(set(figure.slices)) == 1 and figure.kind != "with"
        # Nor a time that is printed a second time, as the paper's own choice of slices.
        twins = [f for f in PUBLISHED if f.kind == "with" and f.slices == figure.slices and f.setting == figure.setting]
        assert figure.setting.number != 10 and not twins
    others = [dataclasses.replace(f, published_s=(i * 7919) % 13 + 1.0) for i, f in enumerate(PUBLISHED)]
    assert calibration_set(others) == calibration_set(PUBLISHED), "no published time decides"


@pytest.mark.parametrize("index", range(0, len(PUBLISHED), 4))
def test_the_simulator_agrees_with_the_closed_form(index):
    assert simulated(PUBLISHED[index], RATES) == pytest.approx(closed_form(PUBLISHED[index], RATES), rel=1e-9)


def test_held_out_times_and_setting_10_are_predicted(result):
    held_out = [entry for entry in result.compared if entry.held_out]
    logs = [abs(math.log(entry.simulated_s / entry.figure.published_s)) for entry in held_out]
    assert len(logs) == 22 and result.held_out_mean_error == pytest.approx(sum(logs) / 22) and sum(logs) / 22 <= 0.08
    tenth = result.speedups[9]
    assert tenth.setting.number == 10 and tenth.simulated == pytest.approx(5.822 / 1.160, rel=0.10)
    # Two standard deviations of the prior; the times would rather be fitted exactly.
    assert 0.1 < max(map(abs, result.shifts.values())) < 2


def test_own_plans_are_never_slower_than_the_papers(result):
    gains = []
    for entry in result.speedups:
        theirs = next(c for c in result.compared if c.figure.setting == entry.setting and c.figure.kind == "with")
        gains.append(theirs.simulated_s / entry.own_best_s)
        assert gains[-1] >= 1 and sum(entry.own_best_slices) == 2048
    assert max(gains) > 1.01


def test_the_command_prints_the_table_and_the_same_figures_without_calibration(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(paper, "simulated", closed_form)  # equal, by the test above, and quick
    arguments = ["reproduce-paper", "--uncalibrated", "--granularity", "64", "--json", str(tmp_path / "paper.json")]
    assert cli.main(arguments) == 0
    data, out = json.loads((tmp_path / "paper.json").read_text()), capsys.readouterr().out
    assert len(data["figures"]) == 35 and not any(figure["calibration"] for figure in data["figures"])
    assert all(f"{figure['simulated_s']:.3f} s" in out for figure in data["figures"])
    assert all(f"{entry['speedup_simulated']:.2f}x" in out for entry in data["settings"])
    assert f"simulated / published)|: {data['held_out_mean_error']:.3f} over the 29 times" in out
