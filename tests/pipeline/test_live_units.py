"""What a stage holds while a step runs: the engine counts what the simulator says, and 1F1B over slices keeps it small."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from ds_terapipe.schedule import Op, order, simulate
from tests.benchmarks.emulated import Case, SleepCost, data_for, new_engine
from tests.spawn import launched

STAGES, MICRO_BATCHES, TOKENS = 8, 32, 12
CASES = {"1f1b": ("1f1b", 4), "flush": ("terapipe", 4), "plain 1f1b": ("1f1b", 1)}


class Peak(NamedTuple):
    """Most units, and tokens, that were live at once on a stage."""

    units: int
    tokens: int


def worker(rank: int, world_size: int) -> dict[str, Peak]:
    peaks = {}
    for name, (schedule, slices) in CASES.items():
        case = Case(schedule, MICRO_BATCHES, (TOKENS // slices,) * slices)
        engine = new_engine(SleepCost(0.0, 0.0, 0.0), case, STAGES)
        engine.train_batch(iter(data_for(case)))
        peaks[name] = Peak(engine.peak_live_units, engine.peak_live_tokens)
        engine.destroy()
    return peaks


ranks = launched(worker, STAGES, timeout=180)


@pytest.mark.parametrize("name", CASES)
def test_the_engine_counts_on_every_stage_what_the_simulator_says(ranks: list[dict[str, Peak]], name: str) -> None:
    schedule, slices = CASES[name]
    simulated = simulate(
        order(schedule, STAGES, [slices] * MICRO_BATCHES),
        compute=lambda action: 1.0 if action.op is Op.FORWARD else 2.0,
        tokens=lambda action: TOKENS // slices,
    )
    assert [rank[name] for rank in ranks] == [Peak(s.peak_units, s.peak_tokens) for s in simulated.places]


def test_sequences_that_are_live_on_the_first_stage(ranks: list[dict[str, Peak]]) -> None:
    live = {name: peak.tokens / TOKENS for name, peak in ranks[0].items()}
    assert live["flush"] == 32 and live["plain 1f1b"] == 8
    assert 2.0 < live["1f1b"] <= 2.75 + 0.1
