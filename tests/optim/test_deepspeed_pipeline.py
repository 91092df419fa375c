"""``"optimizer": {"type": "FusedLamb"}`` on pipelines of 4 ranks: stages, replicas, ZeRO-1, bf16, tied weights, slices."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import PipelineModule

import ds_terapipe
from ds_terapipe.errors import ConfigError
from tests.mutants.claims import holds
from tests.optim.replay import decayed_and_not, lamb, off_by, replay, same, state
from tests.pipeline.models import SEED, masked_loss, steps_of, tied_gpt
from tests.pipeline.test_engine_fp16 import allow_fp16
from tests.pipeline.training import mine
from tests.spawn import launched, run_ranks

# Each step rounds to fp32 once more: 3 steps of 6e-8, and the ratio's own rounding of 1e-7 times lr.
CLOSE = 1e-6
# Without ZeRO DeepSpeed accumulates bf16 gradients in bf16 and rounds them again as it clips them, by 2^-9 of each: so much do
# ratios differ, and parameters, which move by lr times as much; twice that, as the steps add up.
CLIPPED_IN_BF16 = 2.0**-8
CLIP = 0.3
STEPS = 3
ZERO1 = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.02, "warmup_num_steps": 100}}
SLICES = {"slices": [7, 2, 9, 1, 5]}

SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {"clip": CLIP},
    "fp32, slices": {"clip": CLIP, "token_pipeline": SLICES, "params": {"mode": "deepspeed"}},
    "fp32, four stages": {"stages": 4, "params": {"max_grad_norm": CLIP}, "clip": None},
    "fp32 zero1": {"clip": CLIP, "config": ZERO1},
    "fp32 zero1, two groups": {"config": ZERO1, "grouped": True},
    "bf16": {"config": BF16},
    "bf16, four stages": {"stages": 4, "clip": CLIP, "config": BF16},
    "bf16 zero1": {"clip": CLIP, "config": {**BF16, **ZERO1}},
    "fp16": {"clip": CLIP, "config": FP16},
    "fp16, slices": {"clip": CLIP, "config": FP16, "token_pipeline": SLICES},
    "bf16 zero1, fp32 sum, slices": {"config": {**BF16, **ZERO1, **FP32_SUM}, "token_pipeline": SLICES},
}


def engine(
    stages: int = 2,
    clip: float | None = 0.0,
    config: dict[str, Any] | None = None,
    grouped: bool = False,
    params: dict[str, Any] | None = None,
    token_pipeline: dict[str, Any] | None = None,
) -> Any:
    """DeepSpeed's engine, or ours with ``token_pipeline``, on 4 ranks."""
    model = PipelineModule(
        tied_gpt(2),
        num_stages=stages,
        loss_fn=masked_loss,
        partition_method="uniform",
        seed_layers=True,
        base_seed=SEED,
    )
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": stages // 2,
        "steps_per_print": None,
        "optimizer": lamb(**(params or {})),
        "scheduler": SCHEDULER,
        **(config or {}),
    }
    if clip is not None:
        settings["gradient_clipping"] = clip
    if token_pipeline is not None:
        settings["token_pipeline"] = token_pipeline
    groups = decayed_and_not(model.named_parameters()) if grouped else None
    built, *_ = ds_terapipe.initialize(model=model, config=settings, model_parameters=groups)
    assert built.optimizer_name() == "FusedLamb" and type(built.basic_optimizer).__name__ == "FusedLamb"
    return built


def train(built: Any, step: int) -> None:
    built.train_batch(iter(mine(built, steps_of(step + 1, 2)[step])))


def poisoned(built: Any, rank: int, poisoned_rank: int) -> dict[str, Any]:
    """A step in which one gradient of one rank is nan, before replicas are averaged; then a good one."""
    before, skipped = state(built), built.skipped_steps
    hook = None
    if rank == poisoned_rank:
        victim = next(p for name, p in reversed([*built.module.named_parameters()]) if p.dim() == 1)
        hook = victim.register_hook(lambda g: g * float("nan"))
    train(built, 0)
    if hook is not None:
        hook.remove()
    kept = same(before, state(built))
    counted = built.skipped_steps - skipped
    train(built, 1)
    moved = not same(before, state(built)) and all(torch.isfinite(p).all() for p in built.module.parameters())
    return {"kept": kept, "counted": counted, "moved": bool(moved), "again": built.skipped_steps - skipped - counted}


def resumed(setup: dict[str, Any], folder: str) -> bool:
    """Two steps, a checkpoint, two more; and these two again from the checkpoint: bit for bit the same on this rank?"""
    first = engine(**setup)
    train(first, 0)
    train(first, 1)
    first.save_checkpoint(folder, tag="two")
    train(first, 2)
    train(first, 3)
    second = engine(**setup)
    second.load_checkpoint(folder, tag="two")
    train(second, 2)
    train(second, 3)
    equal = same(state(first), state(second)) and second.global_steps == 4
    first.destroy()
    second.destroy()
    return equal


def replayed(built: Any, setup: dict[str, Any]) -> dict[str, float]:
    params = {k: v for k, v in setup.get("params", {}).items() if k != "max_grad_norm"}
    return replay(built, partial(train, built), STEPS, grouped=setup.get("grouped", False), **params)


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    allow_fp16()
    found: dict[str, Any] = {"replay": {}, "nan": {}, "resumed": {}}
    for name, setup in SETUPS.items():
        built = engine(**setup)
        found["replay"][name] = replayed(built, setup)
        if name in NANS:
            # rank 3 is on the last of two stages, in the second replica; of four stages the last has but the tied weight
            found["nan"][name] = poisoned(built, rank, 1 if "four" in name else 3)
        built.destroy()
    try:
        engine(stages=4, grouped=True, config=ZERO1)
    except ConfigError as error:
        found["refused"] = str(error)
    for name in RESUMED:
        found["resumed"][name] = resumed(SETUPS[name], f"{folder}/{name.replace(' ', '-')}")
    return found


NANS = ["fp32", "fp32, four stages", "fp32, slices", "fp32 zero1, two groups", "bf16", "bf16 zero1", "fp16"]
RESUMED = ["fp32", "fp32 zero1, two groups", "bf16", "bf16 zero1"]


ranks = launched(worker, 4, timeout=400, folder=True)


@pytest.mark.parametrize("name", SETUPS)
def test_steps_are_those_of_one_unsharded_optimizer(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        errors = rank["replay"][name]
        rounded = name == "bf16, four stages"
        assert errors["parameters"] <= (0.02 * CLIPPED_IN_BF16 if rounded else CLOSE), errors
        assert errors["ratios"] <= (CLIPPED_IN_BF16 if rounded else CLOSE), errors
        assert errors["unequal"] == 0, "ratios differ between ranks"
        assert errors["unlike"] == 0, "gradients or weights differ between the ranks that hold them"
        assert errors["moved"] > 1e-4
        assert errors["norm"] <= CLOSE * 10  # DeepSpeed adds the squares up in fp32
        assert bool(errors["clipped"]) == (SETUPS[name].get("clip", 0.0) != 0.0)


@pytest.mark.parametrize("name", NANS)
def test_a_nan_anywhere_skips_everywhere(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank["nan"][name] == {"kept": True, "counted": 1, "moved": True, "again": 0}


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["resumed"][name] for rank in ranks] == [True] * 4


def test_stages_with_different_groups_are_refused_under_zero(ranks: list[dict[str, Any]]) -> None:
    """Of four stages the last has the tied weight alone, and so no group of biases and norms."""
    for rank in ranks:
        assert rank["refused"].startswith("zero_optimization.stage: got parameter groups whose number differs")
        assert "(1 to 2, empty ones not counted)" in rank["refused"]


# ------------------------------------------------------------------------------------------------------ under a mutant


def replays(rank: int, world_size: int, names: Sequence[str]) -> list[dict[str, float]]:
    found = []
    for name in names:
        built = engine(**SETUPS[name])
        found.append(replayed(built, SETUPS[name]))
        built.destroy()
    return found


def steps_off_by(mutant: str | None, *names: str) -> float:
    """The largest error of these setups' steps under a mutant, in tolerances; for ``tests.mutants``."""
    return max(off_by(found, CLOSE) for found in run_ranks(replays, 4, names, timeout=240, mutant=mutant))


def goes_on(rank: int, world_size: int, names: Sequence[str], folder: str) -> dict[str, Any]:
    return {"resumed": {name: resumed(SETUPS[name], f"{folder}/{number}") for number, name in enumerate(names)}}


def training_goes_on(mutant: str | None, *names: str) -> bool:
    """Whether these setups go on from checkpoints bit for bit under a mutant; for ``tests.mutants``."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(goes_on, 4, names, folder, timeout=240, mutant=mutant)
    return all(holds(test_training_goes_on_bit_for_bit, found, name) for name in names)
