"""The trace of chosen steps: every action that the schedule names, on every rank, in order, and nothing else changed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ds_terapipe.pipeline.recording.trace import TraceFile
from ds_terapipe.pipeline.step_grid import grid_of_step
from ds_terapipe.schedule import Placement
from ds_terapipe.tracing.chrome import MEASURED, Event, read
from ds_terapipe.tracing.summary import summarise
from tests.pipeline.models import gpt, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import launch, run_ranks

SLICED = {"slices": 3}
STEPS, MICRO_BATCHES = 4, 2


def losses(**keys: Any) -> list[float]:
    engine = build_engine(gpt(), masked_loss, token_pipeline={**SLICED, **keys}, micro_batches=MICRO_BATCHES)
    found = train(engine, steps_of(STEPS, MICRO_BATCHES)).losses
    engine.destroy()
    return found


def worker(rank: int, world_size: int, folder: str) -> list[list[float]]:
    chosen = losses(trace_path=f"{folder}/chosen.json", trace_steps=[2, 3])
    cut_short = losses(trace_path=f"{folder}/short.json", trace_steps=[4, 9])
    default = losses(trace_path=f"{folder}/new/default.json")
    too_late = losses(trace_path=f"{folder}/late.json", trace_steps=[7, 9])
    return [losses(), chosen, cut_short, default, too_late]


def unwritable(rank: int, world_size: int, path: str) -> None:
    losses(trace_path=path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    for results in run_ranks(worker, 2, str(folder)):
        assert all(other == results[0] for other in results[1:]), "a traced run trains as an untraced one, bit for bit"
    return folder


def test_the_actions_are_those_of_the_schedule(folder: Path) -> None:
    events = read(folder / "chosen.json")
    grid = grid_of_step("1f1b", Placement.plain(2), (3,) * MICRO_BATCHES, (0, 1))
    assert {event.step for event in events} == {2, 3} and {event.run for event in events} == {MEASURED}
    for step in (2, 3):
        for stage, row in enumerate(grid):
            mine = sorted((e for e in events if (e.step, e.stage) == (step, stage)), key=lambda e: e.start)
            assert [e.name for e in mine if e.action] == [str(action) for action in row]
            ending = ["tied gradients", "gradients", "optimiser", "loss"]
            assert [e.name for e in mine if not e.action] == ending
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(mine)), "one after the other"


def test_stages_share_a_clock(folder: Path) -> None:
    """A message is not received before it was sent: what a receive ends with began before, on the other stage."""
    events = {(e.step, e.name): e for e in read(folder / "chosen.json")}
    received = [e for e in events.values() if e.action and e.action.op.is_receive]
    assert len(received) == 2 * 2 * 3 * MICRO_BATCHES
    for event in received:
        sent = events[event.step, str(event.action.counterpart)]
        assert sent.start < event.end


def test_a_summary_of_it_is_a_whole_step(folder: Path) -> None:
    for line in summarise(read(folder / "chosen.json")):
        assert line.steps == 2 and 0 < line.busy < line.schedule and 0 <= line.bubble < 1
        assert set(line.waiting) == {1 - line.stage}


def test_steps_that_were_reached_are_kept_and_others_not(folder: Path) -> None:
    def steps(name: str) -> list[int]:
        return sorted({event.step for event in read(folder / name)})

    assert steps("short.json") == [4], "the run ended inside the window"
    assert steps("new/default.json") == [3, 4]
    assert not (folder / "late.json").exists()
    assert sorted(path.name for path in folder.rglob("*.json*")) == ["chosen.json", "default.json", "short.json"]


def test_a_file_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    for result in launch(unwritable, 2, str(blocker / "trace.json")):
        assert result.error is not None and result.error.startswith("ConfigError: token_pipeline.trace_path: got ")


def test_an_event_is_cheap_and_says_so(folder: Path) -> None:
    about = json.loads((folder / "chosen.json").read_text())["otherData"]
    events = read(folder / "chosen.json")
    last = [event for event in events if (event.step, event.rank) == (3, 0)]
    seconds = max(event.end for event in last) - min(event.start for event in last)
    assert about["events_per_step"] == len(last)
    assert about["overhead"] == pytest.approx(len(last) * about["seconds_per_event"] / seconds, rel=1e-3)


def test_what_came_between_two_steps_is_a_trace_too(tmp_path: Path) -> None:
    """As where data end after a reshape that was to be recorded."""
    trace = TraceFile(str(tmp_path / "trace.json"), (1, 2), {"stages": 1})
    assert trace.wants(1)
    trace.keep([Event(MEASURED, 0, 0, 1, "reshape", "reshape", 0.0, 1.0)])
    trace.close()
    assert [event.name for event in read(tmp_path / "trace.json")] == ["reshape"]
