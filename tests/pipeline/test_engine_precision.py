"""In bf16 slices are as exact as DeepSpeed's whole sequences; fp16 skips steps that overflow and clips by the true norm."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import allow_fp16, build_engine, train, train_plain, worst
from tests.spawn import launched, run_ranks

SLICES, MICRO_BATCHES, STEPS, CLIP = 8, 2, 2, 0.5
LOSS_ROUNDING = 2.0**-11  # of a mean of losses made from bf16 logits
BF16 = {"bf16": {"enabled": True}}
CONFIGS = {"bf16": BF16, "bf16 zero1": {**BF16, "zero_optimization": {"stage": 1}}}
WAYS = {"unsliced": None, "sliced": "auto", "by slice": "slice"}  # weight gradients; None: DeepSpeed's own engine
RUNS = {"bf16": ("unsliced", "sliced"), "bf16 zero1": tuple(WAYS)}


def trained(name: str, way: str) -> dict[str, float]:
    """Errors on two stages against fp64, from weights that bf16 can hold."""
    keys = None if WAYS[way] is None else {"slices": SLICES, "weight_gradients": WAYS[way], "verify": False}
    options: Any = {"micro_batches": MICRO_BATCHES, "config": CONFIGS[name]}
    engine = build_engine(tied_gpt(), masked_loss, token_pipeline=keys, **options)
    steps = steps_of(STEPS, MICRO_BATCHES, length=48)
    got = train(engine, steps)
    engine.destroy()
    sgd = partial(torch.optim.SGD, lr=0.2)
    exact = train_plain(tied_gpt(), masked_loss, steps, sgd, dtype=torch.float64, start=torch.bfloat16)
    return {
        "loss": sum(abs(a / b - 1) for a, b in zip(got.losses, exact.losses, strict=True)) / STEPS,
        "gradients": together(zip(got.gradients, exact.gradients, strict=True)),
        "weights": together([(got.weights, exact.weights)]),
    }


def together(pairs: Iterable[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> float:
    """The error of all tensors as of one: that of a small one is a matter of luck, and of the processor."""
    found = [(mine[name].double().flatten(), exact[name].double().flatten()) for mine, exact in pairs for name in mine]
    return float(sum((a - b).square().sum() for a, b in found) / sum(b.square().sum() for _, b in found)) ** 0.5


def worker(rank: int, world_size: int) -> dict[str, dict[str, dict[str, float]]]:
    return {name: {way: trained(name, way) for way in ways} for name, ways in RUNS.items()}


ranks = launched(worker, 2, timeout=240)


@pytest.mark.parametrize("name", CONFIGS)
def test_slices_are_as_exact_as_the_whole(ranks: list[Any], name: str) -> None:
    for own, *ours in (found[name].values() for found in ranks):
        for got in ours:
            assert got["gradients"] <= 1.2 * own["gradients"] and got["weights"] <= 1.2 * own["weights"], (got, own)
            assert got["loss"] <= max(1.2 * own["loss"], LOSS_ROUNDING), (got, own)


# ------------------------------------------------------------------------------------------------- fp16, with loss scaling

OVERFLOWS = {"enabled": True, "loss_scale": 0, "initial_scale_power": 22, "hysteresis": 1}


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
