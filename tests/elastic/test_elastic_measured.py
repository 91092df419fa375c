"""Shapes chosen by measured layer times, in real runs by a clock that only layers move: nothing depends on the load."""

import re
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor

from ds_terapipe.elastic.settings import parse
from ds_terapipe.elastic.shapes.measured import ShapeSelector
from tests.elastic.training import Case, data_of, engine_of, reference_on
from tests.pipeline.models import Block, Embedding, FrozenEmbedding, Head
from tests.spawn import launched

FORWARD, BACKWARD = 0.01, 0.03  # seconds of each block
CLOCK = SimpleNamespace(now=0.0)


class Marked(torch.cuda.Event):
    """An event of a device, whose time is the clock's when it was recorded."""

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self.at = CLOCK.now

    def elapsed_time(self, end: Any) -> float:
        return 1000.0 * float(end.at - self.at)


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        CLOCK.now += FORWARD
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CLOCK.now += BACKWARD
        return gradient


Timed: Any = type("Timed", (Block,), {"forward": lambda self, hidden: Block.forward(self, _Takes.apply(hidden))})
FrozenTimed = type("FrozenTimed", (Timed,), {"__init__": lambda self: (Timed.__init__(self), self.requires_grad_(False))[0]})


def timed(by_hand: bool = False) -> list[Any]:
    """Six entries, the first three of them frozen by hand or not."""
    first = [FrozenEmbedding, FrozenTimed, FrozenTimed] if by_hand else [Embedding, Timed, Timed]
    return [LayerSpec(kind) for kind in (*first, Timed, Timed, Head)]


class Lopsided(PipelineModule):
    """Two stages, of two layers and four."""

    def _partition_layers(self, method: str = "uniform") -> None:
        super()._partition_layers(method)
        self.parts = [0, 2, 6]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


class Hooked(PipelineModule):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.stage_id == 1:
            self.forward_funcs[0].register_forward_hook(lambda module, inputs, output: None)


def ending(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Says, as torch's and this package's do, after how many steps the training ends."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scheduler.total_steps = 6
    return scheduler


class Run(NamedTuple):
    """A training of two stages, and where it must run."""

    seen: list[tuple[int, int, list[int]]]  # steps, stages and first entries of the stages, of one part after the other
    block: dict[str, Any] = {}  # of ``elastic_pipeline``, beside the frozen layers
    freeze: tuple[tuple[int, int], ...] = ((5, 3),)  # pairs of the schedule; none: "static"
    options: dict[str, Any] = {}  # of the engine; "peak" and "by hand" are this file's

    @property
    def case(self) -> Case:
        frozen = ((0, 3),) if "by hand" in self.options else self.freeze
        steps = sum(steps for steps, *_ in self.seen)
        return Case("gpt", "adamw", 2, frozen, (), slices=None, steps=steps, batch=4, size=1)

    @property
    def data(self) -> list[list[Any]]:
        """Its micro-batches, which come again where all that is frozen is so from the first step on."""
        steps = data_of(self.case)
        return [steps[number % 2] for number in range(len(steps))] if "by hand" in self.options else steps


V = {"slices": 1, "stages_per_place": 2, "placement": "v"}
EVEN, ONE, OFF = [0, 3, 6], [0, 6], {"resize": {"policy": "off"}, "partition": "measured"}
CHECKPOINTS = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Timed"]}
RUNS = {
    # two replicas take 8 x 0.04 each where the pipeline takes 10; with two blocks frozen 2 x 0.02 + 4 x 0.04, and about 5 x 0.04
    "taken": Run([(3, 2, EVEN), (4, 1, ONE)]),
    "near the end": Run([(5, 2, EVEN)], options={"lr_scheduler": ending}),
    "cannot move": Run([(4, 2, EVEN)], freeze=(), options={"kind": Hooked}),
    "too large": Run([(5, 2, EVEN)], {"resize": {"policy": "measured", "memory_gb": 1e-4}}),
    "like the start": Run([(5, 2, EVEN)], {"resize": {"policy": "measured"}}, options={"peak": 1.0}),
    "recomputed": Run([(5, 2, EVEN)], {"resize": {"policy": "measured"}}, options={"module": CHECKPOINTS}),
    # 0.02 and 0.08 of the stages of three, 0.06 and 0.04 with one more on the first
    "a list": Run([(5, 2, EVEN), (2, 2, [0, 4, 6])], {"resize": {"policy": [[99, 1]]}}),
    "kept": Run([(3, 2, EVEN), (6, 1, ONE)], {"cache": {"enabled": True}}, ((4, 2), (8, 4))),
    "divided again": Run([(3, 2, [0, 2, 6]), (7, 2, EVEN)], OFF, (), {"kind": Lopsided}),
    # two places, of two stages each, take 0.36: 4 x 0.08, and half of 0.08 to fill the pipeline
    "of four stages": Run([(3, 2, [0, 2, 3, 4, 6]), (4, 1, ONE)], options={"token_pipeline": V}),
    # all of the first stage is frozen, and kept takes nothing; with one more of the others on it both take 0.04, not 0.08
    "by hand, kept": Run([(3, 2, EVEN), (4, 2, [0, 4, 6])], {**OFF, "cache": {"enabled": True}}, (), {"by hand": True}),
}


def run(name: str) -> dict[str, Any]:
    this, lines, seen = RUNS[name], [], []
    freeze: dict[str, Any] = {"policy": "static"}
    if this.freeze:
        freeze = {"policy": "schedule", "frozen_layers": [list(pair) for pair in this.freeze]}
    options = {key: value for key, value in this.options.items() if key not in ("peak", "by hand")}
    with (
        mock.patch("ds_terapipe.elastic.shapes.measured.emit", lines.append),
        mock.patch("ds_terapipe.pipeline.recording.report.emit", lines.append),
        mock.patch.object(ShapeSelector, "peak_bytes", lambda self: this.options.get("peak")),
        mock.patch("time.perf_counter", lambda: CLOCK.now),
        mock.patch("torch.cuda.Event", Marked),
    ):
        config = {"elastic_pipeline": {"freeze": freeze, **this.block}}
        engine, losses = engine_of(this.case, specs=timed("by hand" in this.options), config=config, **options), []
        for step in this.data:
            losses.append(float(engine.train_batch(iter(step))))
            seen.append((engine.num_stages, list(map(int, engine.module.parts))))
        read = engine.cache_counts.read
        engine.destroy()
    return {"losses": losses, "seen": seen, "read": read, "lines": lines}


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {name: run(name) for name in RUNS}


ranks = launched(worker, 2, timeout=200)


@pytest.mark.parametrize("name", RUNS)
def test_the_shape_is_the_one_that_layer_times_ask_for(ranks: Any, name: str) -> None:
    wanted = [(stages, parts) for steps, stages, parts in RUNS[name].seen for _ in range(steps)]
    for found in (rank[name] for rank in ranks):
        assert found["seen"] == wanted, ranks[0][name]["lines"]
        assert found["losses"] == pytest.approx(reference_on(RUNS[name].case, RUNS[name].data).losses, rel=1e-5)


@pytest.mark.parametrize(("name", "line", "taken"), [
    ("taken", "1 stage x 2 replicas (2 micro-batches of 1) of 6 layers, 0.", True),
    ("near the end", "1 stage x 2 replicas (2 micro-batches of 1) of 6 layers, 0.", False),
    ("recomputed", "beside activation checkpointing", False),
    ("too large", ", but a rank holds 0.00 GB", False),
    ("cannot move", "resize.policy: off, since elastic_pipeline.resize.policy: got 1 hooks on module 3", False),
])  # fmt: skip
def test_one_line_says_what_was_found_and_whether_it_was_taken(ranks: Any, name: str, line: str, taken: bool) -> None:
    said = ranks[0][name]["lines"][0]
    assert line in said and ("(taken)" in said) == taken and ranks[1][name]["lines"] == []


def test_what_is_kept_takes_nothing(ranks: Any) -> None:
    """Step 8 freezes three blocks of four: with what they put out kept, two replicas take 2 x 0.04 each, else 0.06 more."""
    lines = [line for line in ranks[0]["kept"]["lines"] if "is predicted to take" in line]
    assert len(lines) == 3 and re.findall("as it is, ([0-9.]+) s", lines[-1])[0] == "0.080"
    assert ranks[0]["by hand, kept"]["read"] >= 4 * 3
    divided = ranks[0]["divided again"]["lines"]
    assert len(divided) == 2 and "and was predicted to take 0." in divided[1] and ranks[0]["a list"]["lines"] == []


@pytest.mark.parametrize(("device", "resize", "weighs"), [
    ("cpu", {}, False), ("cpu", {"memory_gb": 1}, True), ("cuda", {}, True), ("cuda", {"policy": "off"}, False),
])  # fmt: skip
def test_memory_of_the_timed_steps_is_measured_where_it_is_limited(device: str, resize: Any, weighs: bool) -> None:
    engine = mock.MagicMock(device=torch.device(device), elastic_pipeline=parse({"elastic_pipeline": {"resize": resize}}))
    selector, begun = ShapeSelector(engine, mock.MagicMock()), []
    with mock.patch("torch.cuda.synchronize"):
        for _ in range(4):
            with selector.watching():
                begun.append(engine._memory.begin.call_count)
    assert begun == ([0, 1, 2, 2] if weighs else [0] * 4)
