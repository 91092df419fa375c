"""Every wrapper that DeepSpeed has for bf16 is as exact in slices as unsliced, and clips by the true norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.pipeline.models import masked_loss, steps_of, tied_gpt
from tests.pipeline.training import Trace, build_engine, errors, train, train_plain
from tests.spawn import launched

STEPS = 3
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
LATE = {"bf16": {"enabled": True, "immediate_grad_update": False}}
BF16 = {  # the optimiser classes that DeepSpeed 0.19.8 chooses among
    "zero0": {"bf16": {"enabled": True}},
    "zero0, gathered after backward": LATE,
    "zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "zero1, fp32 sum, gathered after backward": {**LATE, "zero_optimization": {"stage": 1}, **FP32_SUM},
}
CLIP = 0.5
LOSS_ROUNDING = 2.0**-11  # of a mean of losses made from bf16 logits


@cache
def exact(micro_batches: int, clip: float = 0.0) -> Trace:
    """One process: fp64 from weights that bf16 can hold."""
    return train_plain(
        tied_gpt(), masked_loss, steps_of(STEPS, micro_batches, length=48), partial(torch.optim.SGD, lr=0.2), clip,
        dtype=torch.float64, start=torch.bfloat16,
    )  # fmt: skip


def trained(slices: int | None, micro_batches: int, clip: float = 0.0, **options: Any) -> dict[str, float]:
    """Errors on two stages; ``slices`` None: of DeepSpeed's own engine."""
    keys = None if slices is None else {"slices": slices, **options.pop("keys", {})}
    engine = build_engine(
        tied_gpt(), masked_loss, token_pipeline=keys, micro_batches=micro_batches, clip=clip, **options
    )
    trace = train(engine, steps_of(STEPS, micro_batches, length=48))
    engine.destroy()
    return errors(trace, exact(micro_batches, clip))


def runs() -> dict[str, Callable[[], dict[str, float]]]:
    found = {}
    for name, config in BF16.items():
        for slices in (None, 8):
            found[f"{name}/{'own' if slices is None else slices}"] = partial(trained, slices, 4, config=config)
    # every weight's gradient comes slice by slice, and is still rounded once
    per_slice = {"weight_gradients": "slice"}
    found["zero1/8, weight gradients per slice"] = partial(trained, 8, 4, config=BF16["zero1"], keys=per_slice)
    for name in ("zero0", "zero1"):
        found[f"{name}, clipped"] = partial(trained, 8, 2, CLIP, config=BF16[name])
    return found


def worker(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    return {name: run() for name, run in runs().items()}


ranks = launched(worker, 2, timeout=240)


@pytest.mark.parametrize("name", BF16)
def test_bf16_is_as_exact_as_unsliced(ranks: list[dict[str, dict[str, float]]], name: str) -> None:
    for found in ranks:
        own = found[f"{name}/own"]
        for key, sliced in found.items():
            if not key.startswith(f"{name}/"):
                continue
            assert sliced["gradients"] <= 1.2 * own["gradients"], (
                f"{key}: {sliced['gradients']:.2e} > {own['gradients']:.2e}"
            )
            assert sliced["loss"] <= max(1.2 * own["loss"], LOSS_ROUNDING), f"{key}: {sliced} {own}"


@pytest.mark.parametrize("name", ["zero0", "zero1"])
def test_bf16_is_clipped_by_the_true_norm(ranks: list[dict[str, dict[str, float]]], name: str) -> None:
    for found in ranks:
        assert found[f"{name}, clipped"]["norms"] <= 1e-2
        assert found[f"{name}, clipped"]["weights"] <= 1e-2
