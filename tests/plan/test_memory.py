"""Memory of a plan: peaks that a ledger of every allocation has found, and models fitted to measured peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_terapipe.plan import MemoryModel, StageMemory, memory_use
from ds_terapipe.plan.costs.memory import Peaks, calibrated
from ds_terapipe.schedule import NAMES, Placement
from tests.schedule import strategies

stage_memories = st.builds(StageMemory, *[st.integers(0, 9).map(float)] * 10)
lengths_of_slices = st.lists(st.integers(1, 9), min_size=1, max_size=4)
# A digit of a peak says of how many tokens a line is held, where large gradients weigh most, and where activations do.
GRADIENTS = StageMemory(1, 2e1, 3e2, 4e3, 5e4, 6e5, 7e6, 8e7, 9e8, 1e10)
ACTIVATIONS = StageMemory(1e10, 2e9, 3e8, 4e7, 5e6, 6e5, 7e4, 8e3, 9e2, 1e1)
PLAIN, FOLDED = Placement.plain(3), Placement.of([0, 1, 1, 0], forward_only=1)
ROWS = [
    (("1f1b", [2, 1], 4, False, PLAIN), {},
     (12_873_001_087, 12_872_151_025, 12_867_500_962), (88_906_088_710, 62_939_888_710, 52_940_088_710)),
    (("1f1b", [2, 1], 4, False, PLAIN), {"posted_ahead": 0, "sent_kept": 0},
     (12_871_201_087, 12_870_001_025, 12_867_001_024), (88_904_288_710, 62_903_088_710, 52_900_088_710)),
    (("1f1b", [2, 1], 4, False, PLAIN), {"posted_ahead": 3, "sent_kept": 8},
     (12_873_601_087, 12_872_751_025, 12_867_500_962), (88_906_688_710, 62_940_488_710, 52_940_088_710)),
    (("1f1b", [2, 1], 4, True, PLAIN), {},
     (10_011_812_125, 10_011_062_063, 10_007_612_000), (88_946_088_700, 62_979_888_700, 52_980_088_700)),
    (("terapipe", [3], 3, False, Placement.plain(2)), {},
     (10_252_400_009, 10_247_300_003), (90_007_294_000, 90_000_094_010)),
    (("terapipe", [2, 1, 1], 2, True, Placement.plain(2)), {},
     (10_008_216_084, 10_007_416_000), (96_005_481_600, 96_000_081_600)),
    (("1f1b", [2, 2], 3, True, FOLDED), {}, (10_019_416_000, 10_019_032_168), (85_324_959_600, 154_586_159_600)),
    (("1f1b", [1, 3], 2, False, Placement.of([0, 1, 0, 1])), {},
     (13_866_151_530, 13_861_401_449), (163_227_751_610, 144_027_367_610)),
    (("forward_only", [2, 1], 12, False, PLAIN), {},
     (2_870_600_062, 2_870_750_062, 2_867_150_062), (26_003_688_700, 26_018_688_700, 26_015_088_700)),
    (("terapipe", [1, 2], 3, True, Placement.of([0, 0, 1], forward_only=1)), {},
     (10_015_812_126, 10_007_462_000), (114_006_158_700, 108_000_088_700)),
]  # fmt: skip


@pytest.mark.parametrize(("how", "kept", "gradients", "activations"), ROWS)
def test_the_peak_is_the_ledgers(how, kept, gradients, activations):
    for lines, peaks in ((GRADIENTS, gradients), (ACTIVATIONS, activations)):
        uses = memory_use(MemoryModel((lines,) * len(how[-1].stages), **kept), *how)
        assert tuple(use.total for use in uses) == peaks


@settings(deadline=None, max_examples=60)
@given(
    st.data(), strategies.placements(), st.sampled_from(NAMES), lengths_of_slices, st.integers(1, 4), st.booleans()
)  # fmt: skip
def test_the_step_that_was_measured_takes_what_was_measured(data, placement, schedule, lengths, micro_batches, once):
    stages = data.draw(st.lists(stage_memories, min_size=len(placement.stages), max_size=len(placement.stages)))
    model = MemoryModel(tuple(replace(stage, working=0.0, joined=0.0) for stage in stages))

    def told(model):
        uses = memory_use(model, schedule, lengths, micro_batches, once, placement)
        assert all(min(use) >= 0 for use in uses)
        return [use.total for use in uses]

    peaks = [total + data.draw(st.integers(0, 50)) for total in told(model)]
    how = (schedule, micro_batches, once, placement)
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
