"""Times of single layers in a run, by a clock that the layers move; `elastic/test_elastic_measured.py` has what they decide."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor

from ds_terapipe.pipeline.autotune import engine_facts, layer_times
from ds_terapipe.pipeline.autotune.phases import ROUNDS
from ds_terapipe.plan import MeasuredCost
from tests.pipeline.models import Block, Embedding, Head, masked_loss, steps_of
from tests.pipeline.training import build_engine, train
from tests.spawn import launched


class Clock:
    """Moves by what slow layers take, and a little whenever it is read."""

    time = 0.0

    def now(self) -> float:
        self.time += 1e-4
        return self.time

    def seconds(self, mark: float, start: float) -> float:
        return mark - start


RAN = Clock()


class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        RAN.time += 0.01
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        RAN.time += 0.02
        return gradient


class Slow(Block):
    """A block that takes long."""

    def forward(self, hidden: Any) -> Any:
        return super().forward(Takes.apply(hidden))


def lines_of(kinds: list[type], checkpoint: int = 0, **keys: str) -> list[str]:
    """Log lines about the stages in a run of these layers, three on each of two, until it is planned."""
    said: list[str] = []
    engine_facts.emit, layer_times.new_clock = said.append, lambda device: RAN
    engine = build_engine(
        [LayerSpec(kind) for kind in kinds], masked_loss, token_pipeline={"slices": "auto", **keys},
        module={"activation_checkpoint_interval": checkpoint}, config={"pipeline": {"use_reentrant": False}},
    )  # fmt: skip
    train(engine, steps_of(1 + 2 * ROUNDS, 2))  # sequences of 24 tokens are tried in two slices and in one
    assert engine._cutting.state()["plans"]
    engine.destroy()
    return [line for line in said if "slowest stage" in line]


def worker(rank: int, world_size: int, folder: str) -> tuple[dict[str, list[str]], Any]:
    unbalanced, path = [Embedding, Slow, Slow, Block, Block, Head], f"{folder}/costs.json"
    found = {
        "unbalanced": lines_of(unbalanced, measurements_path=path),
        "from the file": lines_of(unbalanced, measurements_path=path),
        "balanced": lines_of([Embedding, Block, Slow, Slow, Block, Head]),
        "checkpointed": lines_of(unbalanced, checkpoint=1),
    }
    return found, MeasuredCost.load(path).layers


ranks = launched(worker, 2, folder=True)


def test_stages_that_are_out_of_balance_are_said_once_on_rank_0(ranks):
    (first, layers), (second, _) = ranks
    (line,) = first["unbalanced"]
    assert line.startswith("plan: stages of 2,4 layers would take ")
    assert line.endswith("begin the stages of the PipelineModule at its layers 0, 2 in place of 0, 3")
    assert first["from the file"] == [line] and first["balanced"] == first["checkpointed"] == []
    assert not any(second.values())
    assert all(0.03 < seconds < 0.04 for seconds in layers.stages[0][1:])
