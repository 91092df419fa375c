"""fp16 with loss scaling: static and dynamic, plain and ZeRO-1, clipped by the true norm; a step that overflows is skipped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import allow_fp16, build_engine, train, train_plain, worst
from tests.spawn import run_ranks

CLIP = 0.5
SCALES: dict[str, dict[str, Any]] = {
    "static": {"loss_scale": 128.0},
    "dynamic": {"loss_scale": 0, "initial_scale_power": 10},
    "overflow": {"loss_scale": 0, "initial_scale_power": 32, "hysteresis": 1},
}
CASES = [(scale, stage, 5) for scale in SCALES for stage in (0, 1)]


def compare(stages: int, scale: str, stage: int, slices: int) -> dict[str, Any]:
    """Against fp64 from weights that fp16 can hold, on the steps that were not skipped."""
    engine = build_engine(
        tied_gpt(), masked_loss, token_pipeline={"slices": slices}, stages=stages, clip=CLIP,
        config={"fp16": {"enabled": True, **SCALES[scale]}, "zero_optimization": {"stage": stage}},
    )  # fmt: skip
    steps = steps_of(30 if scale == "overflow" else 3, 2)
    got, skipped = train(engine, steps), engine.skipped_steps
    device = str(engine.device)
    engine.destroy()
    plain = train_plain(
        tied_gpt(), masked_loss, steps[skipped:], partial(torch.optim.SGD, lr=0.2), CLIP, torch.float64, torch.float16
    )
    return {
        "losses": max(abs(a - b) / b for a, b in zip(got.losses[skipped:], plain.losses, strict=True)),
        "norms": max(abs(a - b) / b for a, b in zip(got.norms[skipped:], plain.norms, strict=True)),
        "weights": worst({name: tensor.cpu() for name, tensor in got.weights.items()}, plain.weights),
        "skipped": skipped,
        "device": device,
    }


def worker(rank: int, world_size: int) -> dict[tuple[str, int, int], dict[str, Any]]:
    if get_accelerator().device_name() == "cpu":
        allow_fp16()
    return {case: compare(world_size, *case) for case in CASES}


def check(results: list[dict[tuple[str, int, int], dict[str, Any]]]) -> None:
    for case in CASES:
        for rank, found in enumerate(result[case] for result in results):
            assert found["losses"] <= 2e-3 and found["norms"] <= 5e-3 and found["weights"] <= 1e-2, (case, rank, found)
            assert found["skipped"] == results[0][case]["skipped"]
            assert 1 < found["skipped"] < 28 if case[0] == "overflow" else found["skipped"] == 0, (case, found)


def test_two_stages() -> None:
    check(run_ranks(worker, 2, timeout=180))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_one_stage_on_a_gpu() -> None:
    results = run_ranks(worker, 1, timeout=300, env={"DS_ACCELERATOR": "cuda"})
    check(results)
    assert all(found["device"].startswith("cuda") for found in results[0].values())
