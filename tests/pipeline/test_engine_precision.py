"""Every wrapper that DeepSpeed has for 16 bits is as exact in slices, in any order, as unsliced; fp16 clips by the true norm."""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from ds_terapipe.pipeline import training
from ds_terapipe.schedule import Grid, Placement
from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import Trace, allow_fp16, build_engine, errors, train, train_plain, worst
from tests.schedule.strategies import interleaved_grid, validated
from tests.spawn import launched, run_ranks

STEPS, MICRO_BATCHES, SLICES, CLIP = 2, 2, 8, 0.5
LOSS_ROUNDING = 2.0**-11  # of a mean of losses made from bf16 logits
ZERO1 = {"zero_optimization": {"stage": 1}}
LATE = {"bf16": {"enabled": True, "immediate_grad_update": False}}
FP32 = "zero1"
CONFIGS: dict[str, dict[str, Any]] = {  # in bf16 the optimiser classes that DeepSpeed 0.19.8 chooses among
    FP32: ZERO1,
    "bf16": {"bf16": {"enabled": True}},
    "bf16 zero1": {"bf16": {"enabled": True}, **ZERO1},
    "bf16, gathered after backward": LATE,
    "bf16 zero1, fp32 sum, gathered after backward": {**LATE, **ZERO1, "data_types": {"grad_accum_dtype": "fp32"}},
}
# how an engine runs: its order, and when it makes weight gradients; by slice each is still rounded once
WAYS: dict[str, tuple[str, str] | None] = {
    "unsliced": None,  # DeepSpeed's own engine
    "sliced": ("1f1b", "auto"),
    "by slice": ("1f1b", "slice"),
    "random": ("random", "micro_batch"),
    "random by slice": ("random", "slice"),
}
RUNS = [
    *((name, "unsliced") for name in CONFIGS if name != FP32),
    *((name, "sliced") for name in CONFIGS if name != FP32 and "gathered" not in name),
    ("bf16 zero1", "by slice"),
    # optimisers that gather gradients themselves
    *((name, way) for name in CONFIGS if "gathered" in name for way in ("random", "random by slice")),
    (FP32, "random by slice"),
]


def data() -> list[Any]:
    return steps_of(STEPS, MICRO_BATCHES, length=48)


@cache
def exact(fp32: bool) -> Trace:
    """One process: fp64 from weights that bf16 can hold, or fp32."""
    wide, start = (torch.float32, torch.float32) if fp32 else (torch.float64, torch.bfloat16)
    sgd = partial(torch.optim.SGD, lr=0.2)
    return train_plain(tied_gpt(), masked_loss, data(), sgd, dtype=wide, start=start)


def interleaved(name: str, placement: Placement, slices: tuple[int, ...], deferring: tuple[int, ...] = ()) -> Grid:
    """A random order, with micro-batches that come back together."""
    return validated(interleaved_grid(0, placement.places, slices, weights=bool(deferring))).grid


def trained(name: str, way: str) -> dict[str, float]:
    """Errors on two stages."""
    known, keys = training.grid_of_step, None
    if WAYS[way] is not None:
        order, weights = WAYS[way]
        keys = {"slices": SLICES, "weight_gradients": weights, "verify": False}
        training.grid_of_step = interleaved if order == "random" else known
    options: Any = {"micro_batches": MICRO_BATCHES, "config": CONFIGS[name]}
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline=keys, **options)
    found = errors(train(engine, data()), exact(name == FP32))
    engine.destroy()
    training.grid_of_step = known
    return found


def worker(rank: int, world_size: int) -> dict[Any, dict[str, float]]:
    return {run: trained(*run) for run in RUNS}


ranks = launched(worker, 2, timeout=240)


@pytest.mark.parametrize(("name", "way"), [run for run in RUNS if run[1] != "unsliced"])
def test_slices_in_any_order_are_as_exact_as_the_whole(ranks: list[dict[Any, Any]], name: str, way: str) -> None:
    for found in ranks:
        got = found[name, way]
        if name == FP32:
            assert max(got[what] for what in ("gradients", "weights", "loss")) <= 1e-5, got
            continue
        own = found[name, "unsliced"]
        assert got["gradients"] <= 1.2 * own["gradients"], (got, own)
        assert got["loss"] <= max(1.2 * own["loss"], LOSS_ROUNDING), (got, own)
        assert got["weights together"] <= 1.2 * own["weights together"], (got, own)
        assert got["weights"] <= 1.5 * own["weights"], (got, own)


# ------------------------------------------------------------------------------------------------- fp16, with loss scaling

OVERFLOWS = {"enabled": True, "loss_scale": 0, "initial_scale_power": 18, "hysteresis": 1}


def scaled(stages: int, zero: int) -> dict[str, Any]:
    """Errors against fp64 from weights that fp16 can hold, on the steps that were not skipped."""
    config = {"fp16": OVERFLOWS, "zero_optimization": {"stage": zero}}
    options: Any = {"stages": stages, "clip": CLIP, "config": config}
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline={"slices": 5}, **options)
    steps = steps_of(8, 2)
    got, skipped, device = train(engine, steps), engine.skipped_steps, str(engine.device)
    engine.destroy()
    sgd = partial(torch.optim.SGD, lr=0.2)
    plain = train_plain(tied_gpt(), masked_loss, steps[skipped:], sgd, CLIP, torch.float64, torch.float16)
    pairs = (got.losses[skipped:], plain.losses), (got.norms[skipped:], plain.norms)
    off = [max(abs(a - b) / b for a, b in zip(*pair, strict=True)) for pair in pairs]
    weights = worst({name: weight.cpu() for name, weight in got.weights.items()}, plain.weights)
    return {"off": (*off, weights), "skipped": skipped, "device": device}


def fp16_worker(rank: int, world_size: int) -> list[dict[str, Any]]:
    if get_accelerator().device_name() == "cpu":
        allow_fp16()
    return [scaled(world_size, zero) for zero in (0, 1)]


def check_fp16(results: list[list[dict[str, Any]]]) -> None:
    for rank, zero in itertools.product(range(len(results)), (0, 1)):
        found = results[rank][zero]
        losses, norms, weights = found["off"]
        assert losses <= 2e-3 and norms <= 5e-3 and weights <= 1e-2, (zero, rank, found)
        assert 1 < found["skipped"] == results[0][zero]["skipped"] < 6, (zero, found)


fp16_ranks = launched(fp16_worker, 2, timeout=180)


def test_fp16_on_two_stages_skips_steps_that_overflow_and_clips_by_the_true_norm(fp16_ranks: list[Any]) -> None:
    check_fp16(fp16_ranks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fp16_on_one_stage_on_a_gpu() -> None:
    results = run_ranks(fp16_worker, 1, timeout=300, env={"DS_ACCELERATOR": "cuda"})
    check_fp16(results)
    assert all(found["device"].startswith("cuda") for found in results[0])
