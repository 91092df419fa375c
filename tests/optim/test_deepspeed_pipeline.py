"""``"optimizer": {"type": "FusedLamb"}`` on pipelines of 4 ranks: stages, replicas, ZeRO-1, bf16, tied weights, slices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from deepspeed.pipe import PipelineModule

import ds_terapipe
from ds_terapipe.errors import ConfigError
from tests.optim import replay
from tests.optim.replay import BF16, FP16, FP32_SUM, SKIPPED, check_replay, lamb, poisoned, replayed, resumed, zero
from tests.pipeline.models import SEED, masked_loss, steps_of, tied_gpt
from tests.pipeline.training import allow_fp16, mine
from tests.spawn import launched

# Without ZeRO DeepSpeed accumulates bf16 gradients in bf16 and rounds them again as it clips them, by 2^-9 of each: so much do
# ratios differ, and parameters, which move by lr times as much; twice that, as the steps add up.
CLIPPED_IN_BF16 = 2.0**-8
CLIP = 0.3
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.02, "warmup_num_steps": 100}}
SLICES = {"token_pipeline": {"slices": [7, 2, 9, 1, 5]}}

SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {"clip": CLIP},
    "fp32, slices": {"clip": CLIP, "config": SLICES, "params": {"mode": "deepspeed"}},
    "fp32, four stages": {"stages": 4, "params": {"max_grad_norm": CLIP}, "clip": None},
    "fp32 zero1": {"clip": CLIP, "config": zero(1)},
    "fp32 zero1, two groups": {"config": zero(1), "grouped": True},
    "bf16": {"config": BF16},
    "bf16, four stages": {"stages": 4, "clip": CLIP, "config": BF16},
    "bf16 zero1": {"clip": CLIP, "config": {**BF16, **zero(1)}},
    "fp16, slices": {"clip": CLIP, "config": {**FP16, **SLICES}},
    "bf16 zero1, fp32 sum, slices": {"config": {**BF16, **zero(1), **FP32_SUM, **SLICES}},
}
NANS = ["fp32, four stages", "fp32, slices", "fp32 zero1, two groups", "bf16", "bf16 zero1", "fp16, slices"]
RESUMED = ["fp32", "fp32 zero1, two groups", "bf16", "bf16 zero1"]


def engine(
    stages: int = 2, clip: float | None = 0.0, grouped: bool = False, params: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
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
        **({} if clip is None else {"gradient_clipping": clip}),
        **(config or {}),
    }
    groups = replay.decayed_and_not(model.named_parameters()) if grouped else None
    built, *_ = ds_terapipe.initialize(model=model, config=settings, model_parameters=groups)
    assert built.optimizer_name() == "FusedLamb" and type(built.basic_optimizer).__name__ == "FusedLamb"
    return built


def train(built: Any, step: int) -> None:
    built.train_batch(iter(mine(built, steps_of(step + 1, 2)[step])))


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    allow_fp16()
    found: dict[str, Any] = {"replay": {}, "nan": {}}
    for name, setup in SETUPS.items():
        built = engine(**setup)
        params = {k: v for k, v in setup.get("params", {}).items() if k != "max_grad_norm"}
        found["replay"][name] = replayed(built, train, setup.get("grouped", False), **params)
        if name in NANS:
            # rank 3 is on the last of two stages, in the second replica; of four stages the last has but the tied weight
            biases = [p for _, p in built.module.named_parameters() if p.dim() == 1]
            found["nan"][name] = poisoned(built, train, biases[-1] if rank == (1 if "four" in name else 3) else None)
        built.destroy()
    try:
        engine(stages=4, grouped=True, config=zero(1))
    except ConfigError as error:
        found["refused"] = str(error)
    builds = {name: partial(engine, **SETUPS[name]) for name in RESUMED}
    found["resumed"] = {
        name: resumed(build, train, f"{folder}/{name[:6]}{len(name)}") for name, build in builds.items()
    }
    return found


ranks = launched(worker, 4, timeout=400, folder=True)


@pytest.mark.parametrize("name", SETUPS)
def test_steps_are_those_of_one_unsharded_optimizer(ranks: list[dict[str, Any]], name: str) -> None:
    rounded = name == "bf16, four stages"
    clipped = SETUPS[name].get("clip", 0.0) != 0.0
    for rank in ranks:
        limits = (0.02 * CLIPPED_IN_BF16, CLIPPED_IN_BF16) if rounded else (replay.CLOSE, replay.CLOSE)
        check_replay(rank["replay"][name], clipped, *limits)


@pytest.mark.parametrize("name", NANS)
def test_a_nan_anywhere_skips_everywhere(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["nan"][name] for rank in ranks] == [SKIPPED] * 4


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["resumed"][name] for rank in ranks] == [True] * 4


def test_stages_with_different_groups_are_refused_under_zero(ranks: list[dict[str, Any]]) -> None:
    """Of four stages the last has the tied weight alone, and so no group of biases and norms."""
    for rank in ranks:
        assert rank["refused"].startswith("zero_optimization.stage: got parameter groups whose number differs")
        assert "(1 to 2, empty ones not counted)" in rank["refused"]
