"""The benchmark of predictions: its slicings, what it compares, its verdict."""

from __future__ import annotations

import pytest

from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.evaluate import StepTimes
from tests.benchmarks.prediction import Compared, compare, runs, table
from tests.benchmarks.rounds import Probe, Round
from tests.plan.test_measure import STAGES, TOTAL, Truth, recorded

CLEAN = Probe((1.0, 1.0), (1.05, 1.05))
DIRTY = Probe((1.0, 1.0), (1.5, 1.5))


def test_slicings_add_up_and_two_of_four_have_lengths_that_no_trial_has():
    every = runs(1024, [1, 2])
    assert all(sum(run.slices) == 1024 for run in every) and len({run.name for run in every}) == len(every) == 8
    trials = {length for count in (16, 8, 4, 2, 1) for length in slice_lengths(1024, count)}
    assert sum(not trials & set(run.slices) for run in every) == 4


def test_predictions_are_made_and_judged_with_clean_rounds_alone():
    truth, after, every = Truth(weights=0.02), 0.05, runs(TOTAL, [1, 2])
    taken = {
        run.name: StepTimes(truth, STAGES, run.sequences, True).seconds(run.schedule, run.slices) + after
        for run in every
    }
    slow = {name: 2 * seconds for name, seconds in taken.items()}
    rounds = [Round(DIRTY, DIRTY, slow), Round(CLEAN, CLEAN, taken)]
    steps = [recorded(Truth(weights=1.0), once=True), recorded(truth, once=True, after=after)]
    found, clean = compare(rounds, steps, every)
    assert clean == 1 and [one.measured_s for one in found] == list(taken.values())
    assert max(abs(one.error) for one in found) < 0.01


def test_a_verdict_needs_clean_rounds_and_small_errors():
    good, bad = Compared("a", 1.04, 1.0), Compared("b", 1.13, 1.0)
    assert table([good], 3, 3)[-1].endswith("pass")
    assert table([good], 2, 9)[-1].endswith("inconclusive")
    assert table([good, good, good, good, bad], 3, 3)[-1].endswith("miss")
    assert bad.error == pytest.approx(0.13)
