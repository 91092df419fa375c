"""Records of steps: every action of the schedule on every rank, in order, and the times of single layers."""

import itertools
from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from ds_terapipe.pipeline.autotune import engine_facts
from ds_terapipe.pipeline.autotune.trials import ROUNDS
from ds_terapipe.pipeline.recording import layer_times, trace
from ds_terapipe.pipeline.step_grid import grid_of_step
from ds_terapipe.plan.costs.cost import MeasuredCost
from ds_terapipe.schedule import Placement
from ds_terapipe.tracing.chrome import MEASURED, read
from tests.pipeline.models import Block, Embedding, Head, gpt, masked_loss, steps_of
from tests.pipeline.training import build_engine, raised, train
from tests.spawn import launched

STEPS, MICRO_BATCHES = 4, 2
RUNS: dict[str, dict[str, Any]] = {
    "none": {}, "chosen": {"trace_steps": [2, 3]}, "new/default": {}, "late": {"trace_steps": [7, 9]},
    "short": {"trace_steps": [4, 9]},  # the run ends inside the window
}  # fmt: skip


class Clock:
    """Moves by what slow layers take, and a little whenever it is read."""

    time = 0.0

    def now(self) -> float:
        self.time += 1e-4
        return self.time

    def seconds(self, mark: float, start: float) -> float:
        return mark - start


RAN = Clock()


class Slow(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        RAN.time += 0.03
        return super().forward(hidden)


def lines_of(kinds: list[type], checkpoint: int = 0, **keys: str) -> list[str]:
    """Log lines about the stages in a run of these layers, three on each of two, until it is planned."""
    said: list[str] = []
    engine_facts.emit, layer_times.Clock = said.append, lambda device: RAN
    engine = build_engine(
        [LayerSpec(kind) for kind in kinds], masked_loss, token_pipeline={"slices": "auto", **keys},
        module={"activation_checkpoint_interval": checkpoint}, config={"pipeline": {"use_reentrant": False}},
    )  # fmt: skip
    train(engine, steps_of(1 + 2 * ROUNDS, 2))  # sequences of 24 tokens are tried in two slices and in one
    assert engine._slicer.state()["plans"]
    engine.destroy()
    return [line for line in said if "slowest stage" in line]


def worker(rank: int, world_size: int, folder: str) -> tuple[Any, ...]:
    """Of each run losses and its trace's events, what is said of a file that can't be, and of stages and times of layers."""
    losses, missed, paths = [], list[str](), {name: Path(folder, f"{name}.json") for name in RUNS}
    for name, keys in RUNS.items():
        keys = {"slices": 3, **keys, **({"trace_path": str(paths[name])} if name != "none" else {})}
        engine = build_engine(gpt(), masked_loss, token_pipeline=keys, micro_batches=MICRO_BATCHES)
        losses.append(train(engine, steps_of(STEPS, MICRO_BATCHES)).losses)
        engine.destroy()
    torch.distributed.barrier()
    events = {name: read(path) for name, path in paths.items() if path.exists()}
    unwritable = {"slices": 3, "trace_path": str(paths["chosen"] / "trace.json")}
    said = raised(lambda: build_engine(gpt(), masked_loss, token_pipeline=unwritable).train_batch(iter(steps_of(1, 2)[0])))
    unbalanced, costs = [Embedding, Slow, Slow, Block, Block, Head], f"{folder}/costs.json"
    lines = {
        "unbalanced": lines_of(unbalanced, measurements_path=costs),
        "from the file": lines_of(unbalanced, measurements_path=costs),
        "balanced": lines_of([Embedding, Block, Slow, Slow, Block, Head]),
        "checkpointed": lines_of(unbalanced, checkpoint=1),
        "missed": missed,
    }
    trace.logger.warning = lambda text, *values: missed.append(text % values)  # type: ignore[method-assign, assignment]
    trace.TraceFile("trace.json", (1, 2), {}).wants(3)
    return losses, events, said, lines, MeasuredCost.load(costs).layers


ranks = launched(worker, 2, folder=True, timeout=200)


def test_a_traced_run_trains_as_an_untraced_one_bit_for_bit_and_keeps_the_steps_asked_for(ranks: list[Any]) -> None:
    for losses, events, said, *_ in ranks:
        assert all(other == losses[0] for other in losses[1:])
        steps = {name: sorted({event.step for event in found}) for name, found in events.items()}
        assert steps == {"chosen": [2, 3], "short": [4], "new/default": [3, 4]}
        assert said.startswith("ConfigError: token_pipeline.trace_path: got ")


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


def test_stages_that_are_out_of_balance_are_said_once_on_rank_0(ranks: list[Any]) -> None:
    (first, layers), (second, _) = (found[-2:] for found in ranks)
    (line,) = first["unbalanced"]
    assert line.startswith("plan: stages of 2,4 layers would take ")
    assert line.endswith("begin the stages of the PipelineModule at its layers 0, 2 in place of 0, 3")
    assert first["from the file"] == [line] and first["balanced"] == first["checkpointed"] == []
    assert first["missed"] == ["token_pipeline.trace_steps: got [1, 2], but this run is at step 3 already"]
    assert not any(second.values())
    assert all(0.03 < seconds < 0.04 for seconds in layers.stages[0][1:])
