"""Shapes chosen by measured layer times, in real runs by a clock that only layers move: nothing depends on the load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch import Tensor, nn

from ds_terapipe.elastic.shapes.measured import Chooser
from ds_terapipe.optim.schedules.lr_schedules import LambWarmup
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch
from tests.elastic.training import Case, data_of, engine_of, reference_on
from tests.pipeline.models import Block, Embedding, FrozenEmbedding, Head
from tests.spawn import launched

FORWARD, BACKWARD = 0.01, 0.03  # seconds of each block
FREEZE = {"policy": "schedule", "frozen_layers": [[5, 3]]}


class Clock:
    """Stands in for ``time.perf_counter`` in a process."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        CLOCK.now += FORWARD
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CLOCK.now += BACKWARD
        return gradient


class Timed(Block):
    """A block that takes a known time."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(_Takes.apply(hidden))


def timed() -> list[Any]:
    return [LayerSpec(Embedding), *(LayerSpec(Timed) for _ in range(4)), LayerSpec(Head)]


class FrozenTimed(Timed):
    """That its user has frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def frozen_timed() -> list[Any]:
    """The first three of them frozen by hand."""
    return [LayerSpec(FrozenEmbedding), *(LayerSpec(FrozenTimed) for _ in range(2)), *timed()[3:]]


class Lopsided(PipelineModule):
    """Two stages, of two layers and four."""

    def _partition_layers(self, method: str = "uniform") -> None:
        super()._partition_layers(method)
        self.parts = [0, 2, 6]
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


class Hooked(PipelineModule):
    """With a hook on a live layer, which another rank would not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forward_funcs[0].register_forward_hook(lambda module, inputs, output: None)


def restarting(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Falls while layers are frozen, and begins anew in step 8."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.3 if 5 < step < 8 else 1.0)


def ending(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Says, as torch's and this package's do, after how many steps the training ends."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scheduler.total_steps = 6
    return scheduler


CASE = Case("gpt", "adamw", 2, ((5, 3),), (), slices=None, steps=10, batch=4, size=1)
TWICE = {"policy": "schedule", "frozen_layers": [[4, 2], [8, 4]]}
KEPT = Case("gpt", "adamw", 2, ((4, 2), (8, 4)), (), slices=None, steps=10, batch=4, size=1)
BY_HAND = Case("gpt", "adamw", 2, ((0, 3),), (), slices=None, steps=10, batch=4, size=1)
CHECKPOINTS = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Timed"]}
PERIOD = 2  # steps after which its samples come again
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what is added to the block, and to the engine
    "taken": ({}, {}),
    "near the end": ({}, {"lr_scheduler": ending}),
    "cannot move": ({"freeze": {"policy": "static"}}, {"kind": Hooked}),
    "trains again": (
        {"freeze": {**FREEZE, "unfreeze": ["lr_restart"]}, "resize": {"policy": "measured", "memory_gb": 1}},
        {"lr_scheduler": restarting},
    ),
    "too large": ({"resize": {"policy": "measured", "memory_gb": 1e-4}}, {}),
    "like the start": ({"resize": {"policy": "measured"}}, {"peak": 1.0}),
    "recomputed": ({"resize": {"policy": "measured"}}, {"module": CHECKPOINTS}),
    "a list": ({"resize": {"policy": [[99, 1]]}}, {}),
    "kept": ({"freeze": TWICE, "cache": {"enabled": True}}, {"case": KEPT}),
    "divided anew": (
        {"freeze": {"policy": "static"}, "resize": {"policy": "off"}, "partition": "measured"},
        {"kind": Lopsided},
    ),
    "by hand, kept": (
        {
            "freeze": {"policy": "static"},
            "resize": {"policy": "off"},
            "partition": "measured",
            "cache": {"enabled": True},
        },
        {"case": BY_HAND, "specs": frozen_timed},
    ),
    "left as it is": ({"freeze": {"policy": "static"}, "resize": {"policy": "off"}, "partition": "measured"}, {}),
}


def run(name: str) -> dict[str, Any]:
    block, options = RUNS[name]
    lines: list[str] = []
    peak = mock.patch.object(Chooser, "peak_bytes", lambda self: options.get("peak"))
    where = ("elastic.shapes.measured", "pipeline.recording.report")
    said = [mock.patch(f"ds_terapipe.{module}.emit", lines.append) for module in where]
    with said[0], said[1], peak, mock.patch("time.perf_counter", CLOCK):
        config = {"elastic_pipeline": {"freeze": FREEZE, **block}}
        more = {key: options[key] for key in ("kind", "lr_scheduler", "module") if key in options}
        case = options.get("case", CASE)
        engine = engine_of(case, specs=options.get("specs", timed)(), config=config, **more)
        found: dict[str, Any] = {"losses": [], "seen": [], "parts": list(map(int, engine.module.parts))}
        for step in steps_of(case):
            found["losses"].append(float(engine.train_batch(iter(step))))
            found["seen"].append((engine.num_stages, list(map(int, engine.module.parts))))
        found["read"] = engine.cache_counts.read
        engine.destroy()
    return {**found, "lines": lines}


def steps_of(case: Case) -> list[list[Any]]:
    steps = data_of(case)
    return [steps[number % PERIOD] for number in range(case.steps)] if case is BY_HAND else steps


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {name: run(name) for name in RUNS}


ranks = launched(worker, 2, timeout=200)


def check_losses(ranks: Any, name: str, case: Case) -> None:
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(reference_on(case, steps_of(case)).losses, rel=1e-5)


def test_replicas_are_taken_where_they_are_faster(ranks):
    """Two blocks of four are frozen at step 5: 2 x 0.02 + 4 x 0.04 in a replica, about 5 x 0.04 in a pipeline, and before that
    two replicas are faster, too: 8 x 0.04 each where the pipeline takes 10."""
    check_losses(ranks, "taken", CASE)
    lines = ranks[0]["taken"]["lines"]
    stages = [seen[0] for seen in ranks[0]["taken"]["seen"]]
    assert stages == [2] * 3 + [1] * 7, lines
    assert ranks[1]["taken"]["seen"] == ranks[0]["taken"]["seen"]
    assert lines[0].startswith("elastic_pipeline: a step is predicted to take: as it is, 0.")
    assert "1 stage x 2 replicas (2 micro-batches of 1) of 6 layers, 0." in lines[0] and "(taken)" in lines[0]
    assert ranks[1]["taken"]["lines"] == []


def test_layers_that_are_recomputed_stay_and_one_line_says_why(ranks):
    check_losses(ranks, "recomputed", CASE)
    said = [line for line in ranks[0]["recomputed"]["lines"] if "measured" in line]
    assert len(said) == 1 and "beside activation checkpointing" in said[0] and "use e.g. " in said[0], said
    assert [seen[0] for seen in ranks[0]["recomputed"]["seen"]] == [2] * 10


def test_what_no_longer_pays_before_the_end_is_not_taken(ranks):
    check_losses(ranks, "near the end", CASE)
    line = ranks[0]["near the end"]["lines"][0]
    assert "1 stage x 2 replicas (2 micro-batches of 1) of 6 layers, 0." in line and "(taken)" not in line
    assert [seen[0] for seen in ranks[0]["near the end"]["seen"]] == [2] * 10


def schedulers() -> Iterator[tuple[Any, float]]:
    """Of each kind one with ten steps, and of one that does not know."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3)
    yield WarmupDecayLR(optimizer, total_num_steps=10, warmup_num_steps=2), 10
    yield torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10), 10
    reference = {"reference_lr": 1e-3, "reference_batch_size": 8, "total_steps": 10, "warmup_steps": 1}
    yield LambWarmup(optimizer, batch_size=8, **reference), 10
    phase = {"batch_size": 8, "seq_length": 8, "lr": 1e-3, "warmup_steps": 1}
    yield MixedBatch(optimizer, phases=[{**phase, "steps": 4}, {**phase, "steps": 6}]), 10
    yield torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), math.inf
    other = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    other.total_steps = lambda: 10  # a method: of whoever wrote it
    yield other, math.inf


@pytest.mark.parametrize("scheduler, steps", list(schedulers()), ids=lambda value: type(value).__name__)
def test_how_many_steps_are_left_is_read_from_every_scheduler(scheduler, steps):
    chooser = SimpleNamespace(_engine=SimpleNamespace(lr_scheduler=scheduler, global_steps=3))
    assert Chooser._steps_left(chooser) == steps - 3


def test_without_the_key_what_cannot_move_stays(ranks):
    check_losses(ranks, "cannot move", Case("gpt", "adamw", 2, (), (), slices=None, steps=10, batch=4, size=1))
    (line,) = ranks[0]["cannot move"]["lines"]
    assert line.startswith("elastic_pipeline.resize.policy: off, since") and "1 hooks on module 0" in line, line
    assert ranks[0]["cannot move"]["seen"] == [(2, [0, 3, 6])] * 10


def test_what_trains_again_is_predicted_to_take_what_it_took(ranks):
    """In one stage 8 x 0.04 with nothing frozen; what was timed last is 2 x 0.02 + 4 x 0.04."""
    for rank in ranks:
        assert [seen[0] for seen in rank["trains again"]["seen"]] == [2] * 3 + [1] * 7
    lines = [line for line in ranks[0]["trains again"]["lines"] if "is predicted to take" in line]
    first, frozen, again = (
        float(re.findall(r"1 stage .*? layers, ([0-9.]+) s" if n == 0 else r"as it is, ([0-9.]+) s", line)[0])
        for n, line in enumerate(lines)
    )
    # The block behind frozen ones had no gradient of its input to make when it was timed last, in either micro-batch.
    assert (first, frozen) == (0.32, 0.2) and again == pytest.approx(first - 2 * BACKWARD), lines


def test_what_is_kept_takes_nothing(ranks):
    """Step 8 freezes three blocks of four: with what they put out kept, two replicas take 2 x 0.04 each, else 0.06 more."""
    check_losses(ranks, "kept", KEPT)
    lines = [line for line in ranks[0]["kept"]["lines"] if "is predicted to take" in line]
    assert len(lines) == 3 and [seen[0] for seen in ranks[0]["kept"]["seen"]] == [2] * 3 + [1] * 7, lines
    (seconds,) = map(float, re.findall(r"as it is, ([0-9.]+) s", lines[-1]))
    assert seconds == 0.08, lines


@pytest.mark.parametrize("name", ["too large", "like the start"])
def test_what_does_not_fit_is_not_taken(ranks, name):
    check_losses(ranks, name, CASE)
    for rank in ranks:
        assert {stages for stages, _ in rank[name]["seen"]} == {2}
    assert ", but a rank holds 0.00 GB" in ranks[0][name]["lines"][0]


def test_layers_are_divided_anew_where_more_are_frozen(ranks):
    """Three entries frozen: 0.02 and 0.08 of the stages of three, 0.06 and 0.04 with one more on the first."""
    check_losses(ranks, "a list", CASE)
    for rank in ranks:
        assert rank["a list"]["seen"] == [(2, [0, 3, 6])] * 5 + [(2, [0, 4, 6])] * 5 and rank["a list"]["lines"] == []


def test_layers_frozen_by_hand_are_kept_and_the_others_divided_anew(ranks):
    """Three of six entries, all of the first stage, are frozen; kept they take nothing, and with one more of the others on that
    stage both take 0.04, where the second took 0.08."""
    check_losses(ranks, "by hand, kept", BY_HAND)
    for rank in ranks:
        found = rank["by hand, kept"]
        assert found["parts"] == [0, 3, 6] and found["seen"] == [(2, [0, 3, 6])] * 3 + [(2, [0, 4, 6])] * 7, found[
            "lines"
        ]
    assert ranks[0]["by hand, kept"]["read"] >= 4 * (BY_HAND.steps - 4)


def test_layers_are_divided_by_what_they_take_though_nothing_is_frozen(ranks):
    static = Case("gpt", "adamw", 2, (), (), slices=None, steps=10, batch=4, size=1)
    for name in ("divided anew", "left as it is"):
        check_losses(ranks, name, static)
    for rank in ranks:
        found = rank["divided anew"]
        assert found["parts"] == [0, 2, 6] and found["seen"] == [(2, [0, 2, 6])] * 3 + [(2, [0, 3, 6])] * 7
        said = ranks[0]["divided anew"]["lines"]
        assert len(said) == 2 and "and was predicted to take 0." in said[1]
        assert rank["left as it is"]["seen"] == [(2, [0, 3, 6])] * 10


def test_a_rank_that_trains_nothing_says_nothing_of_what_training_takes():
    """Its optimiser has but the parameter that stands for an empty group."""
    unused, chooser = torch.zeros(2), object.__new__(Chooser)
    module = torch.nn.Linear(2, 2).requires_grad_(False)
    optimizer = SimpleNamespace(state={unused: {"exp_avg": torch.zeros(2)}}, param_groups=[{"params": [unused]}])
    chooser._engine = SimpleNamespace(module=module, basic_optimizer=optimizer)
    chooser._consensus = SimpleNamespace(collect=lambda mine: [mine, 2.0])
    assert chooser._optimizer_share() == 2.0
    module.requires_grad_(True)
    optimizer.state[module.weight] = {"exp_avg": torch.zeros(20)}
    assert chooser._optimizer_share() == (16 + 80) / 24
