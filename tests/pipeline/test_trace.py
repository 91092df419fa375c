"""The trace of chosen steps: every action that the schedule names, on every rank, in order, and nothing else changed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe import ConfigError
from ds_terapipe.pipeline.step_grid import grid_of_step
from ds_terapipe.schedule import Placement
from ds_terapipe.tracing.chrome import MEASURED, read
from ds_terapipe.tracing.summary import summarise
from tests.pipeline.models import gpt, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import launched

STEPS, MICRO_BATCHES = 4, 2
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "chosen": {"trace_steps": [2, 3]},
    "short": {"trace_steps": [4, 9]},  # the run ends inside the window
    "new/default": {},
    "late": {"trace_steps": [7, 9]},
}


def worker(rank: int, world_size: int, folder: str) -> tuple[Any, ...]:
    """Losses of each run, its trace's events, what the chosen one's file says of itself, and of a file that can't be."""
    losses, paths = [], {name: Path(folder, f"{name}.json") for name in RUNS}
    for name, keys in RUNS.items():
        keys = {"slices": 3, **keys, **({"trace_path": str(paths[name])} if name != "none" else {})}
        engine = build_engine(gpt(), masked_loss, token_pipeline=keys, micro_batches=MICRO_BATCHES)
        losses.append(train(engine, steps_of(STEPS, MICRO_BATCHES)).losses)
        engine.destroy()
    torch.distributed.barrier()
    events = {name: read(path) for name, path in paths.items() if path.exists()}
    about = json.loads(paths["chosen"].read_text())["otherData"]
    with pytest.raises(ConfigError) as said:
        unwritable = {"slices": 3, "trace_path": str(paths["chosen"] / "trace.json")}
        build_engine(gpt(), masked_loss, token_pipeline=unwritable).train_batch(iter(steps_of(1, 2)[0]))
    return losses, events, about, str(said.value)


ranks = launched(worker, 2, folder=True)


def test_a_traced_run_trains_as_an_untraced_one_bit_for_bit_and_keeps_the_steps_asked_for(ranks: list[Any]) -> None:
    for losses, events, _, said in ranks:
        assert all(other == losses[0] for other in losses[1:])
        steps = {name: sorted({event.step for event in found}) for name, found in events.items()}
        assert steps == {"chosen": [2, 3], "short": [4], "new/default": [3, 4]}
        assert said.startswith("token_pipeline.trace_path: got ")


def test_the_actions_are_those_of_the_schedule_and_stages_share_a_clock(ranks: list[Any]) -> None:
    events = ranks[0][1]["chosen"]
    grid = grid_of_step("1f1b", Placement.plain(2), (3,) * MICRO_BATCHES, (0, 1))
    assert {event.run for event in events} == {MEASURED}
    for step, (stage, row) in itertools.product((2, 3), enumerate(grid)):
        mine = sorted((e for e in events if (e.step, e.stage) == (step, stage)), key=lambda e: e.start)
        assert [e.name for e in mine if e.action] == [str(action) for action in row]
        assert [e.name for e in mine if not e.action] == ["tied gradients", "gradients", "optimiser", "loss"]
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine)), "one after the other"
    found = {(e.step, e.name): e for e in events}
    received = [e for e in events if e.action and e.action.op.is_receive]
    assert len(received) == 2 * 2 * 3 * MICRO_BATCHES
    for event in received:  # what a receive ends with began before, on the other stage
        assert found[event.step, str(event.action.counterpart)].start < event.end


def test_a_summary_of_it_is_a_whole_step_and_it_says_what_it_costs(ranks: list[Any]) -> None:
    _, events, about, _ = ranks[0]
    for line in summarise(events["chosen"]):
        assert line.steps == 2 and 0 < line.busy < line.schedule and 0 <= line.bubble < 1
        assert set(line.waiting) == {1 - line.stage}
    last = [event for event in events["chosen"] if (event.step, event.rank) == (3, 0)]
    seconds = max(event.end for event in last) - min(event.start for event in last)
    assert about["events_per_step"] == len(last)
    assert about["overhead"] == pytest.approx(len(last) * about["seconds_per_event"] / seconds, rel=1e-3)
