"""bf16, ZeRO-1 and clipping, on two stages of two replicas and on four stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.full import is_full, marked
from tests.pipeline.models import MaskedTokenLoss, masked_loss, steps_of, tied_gpt
from tests.pipeline.training import ADAMW, SGD, Trace, build_engine, errors, train, train_plain
from tests.spawn import run_ranks

STEPS = 3
UNEVEN = [15, 3, 20, 1, 9]  # 48 tokens
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16 = {  # the optimiser classes that DeepSpeed 0.19.8 chooses among
    "zero0": {"bf16": {"enabled": True}},
    "zero0, gathered after backward": {"bf16": {"enabled": True, "immediate_grad_update": False}},
    "zero1": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "zero1, fp32 sum": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **FP32_SUM},
    "zero1, fp32 sum, gathered after backward": {
        "bf16": {"enabled": True, "immediate_grad_update": False},
        "zero_optimization": {"stage": 1},
        **FP32_SUM,
    },
}
FULL = (
    "zero0, gathered after backward",
    "zero1, fp32 sum, gathered after backward",
    "zero1 adamw",
    "clipped replicas",
    "clipped slice",
)
ZERO1 = {"zero_optimization": {"stage": 1}}
CLIP = 0.5
LOSS_ROUNDING = 2.0**-11  # of a mean of losses made from bf16 logits
adamw = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1)
sgd = partial(torch.optim.SGD, lr=0.2)


@cache
def exact(micro_batches: int, clip: float = 0.0, bf16: bool = True, optimizer: Any = sgd) -> Trace:
    """One process: fp64 from weights that bf16 can hold, or fp32."""
    return train_plain(
        tied_gpt(), masked_loss, steps_of(STEPS, micro_batches, length=48), optimizer, clip,
        dtype=torch.float64 if bf16 else torch.float32, start=torch.bfloat16 if bf16 else torch.float32,
    )  # fmt: skip


def trained(slices: Any, stages: int, micro_batches: int, reference: Trace, **options: Any) -> dict[str, float]:
    """``micro_batches`` counts those of all replicas."""
    engine = build_engine(
        tied_gpt(),
        options.pop("loss", masked_loss),
        token_pipeline=None if slices is None else {"slices": slices, **options.pop("keys", {})},
        stages=stages,
        micro_batches=micro_batches * stages // 4,
        **options,
    )
    trace = train(engine, steps_of(STEPS, micro_batches, length=48))
    engine.destroy()
    return errors(trace, reference)


def bf16_runs() -> dict[str, Callable[[], dict[str, float]]]:
    runs = {}
    for name, config in BF16.items():
        for slices in (None, 8, UNEVEN) if name == "zero0" else (None, 8):
            key = f"{name}/{'own' if slices is None else 'uneven' if isinstance(slices, list) else slices}"
            runs[key] = partial(trained, slices, 2, 8, exact(8), config=config)
    for name in ("zero0", "zero1"):  # every weight's gradient comes slice by slice, and is still rounded once
        runs[f"{name}/8, weight gradients per slice"] = partial(
            trained, 8, 2, 8, exact(8), config=BF16[name], keys={"weight_gradients": "slice"}
        )
    for slices in (None, 8):
        runs[f"four stages/{slices or 'own'}"] = partial(trained, slices, 4, 2, exact(2), config=BF16["zero0"])
    runs["clipped/8"] = partial(trained, 8, 2, 2, exact(2, CLIP), clip=CLIP, config=BF16["zero1, fp32 sum"])
    runs["clipped zero0/8"] = partial(trained, 8, 4, 2, exact(2, CLIP), clip=CLIP, config=BF16["zero0"])
    return runs


def fp32_runs() -> dict[str, Callable[[], dict[str, float]]]:
    plain = {"bf16": False}
    return {
        "zero1": partial(trained, UNEVEN, 2, 4, exact(4, **plain), config=ZERO1),
        "zero1 adamw": partial(trained, 8, 2, 4, exact(4, optimizer=adamw, **plain), config=ZERO1, optimizer=ADAMW),
        "zero1 clipped": partial(trained, 4, 2, 4, exact(4, CLIP, **plain), clip=CLIP, config=ZERO1),
        "zero1 four stages": partial(
            trained, 4, 4, 2, exact(2, CLIP, **plain), clip=CLIP, config=ZERO1, loss=MaskedTokenLoss()
        ),
        "clipped": partial(trained, UNEVEN, 4, 2, exact(2, CLIP, **plain), clip=CLIP),
        "clipped replicas": partial(trained, UNEVEN, 2, 4, exact(4, CLIP, **plain), clip=CLIP, optimizer=SGD),
        "clipped slice": partial(
            trained, 8, 2, 4, exact(4, CLIP, **plain), clip=CLIP, keys={"weight_gradients": "slice"}
        ),
        "client optimizer": partial(
            trained, 4, 2, 4, exact(4, CLIP, optimizer=adamw, **plain), clip=CLIP, optimizer=adamw
        ),
    }


Results = list[tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]]


def worker(rank: int, world_size: int, full: bool) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    fp32, bf16 = (
        {name: run() for name, run in runs.items() if (name.split("/")[0] in FULL) == full}
        for runs in (fp32_runs(), bf16_runs())
    )
    return fp32, bf16


@cache
def launched(full: bool) -> Results:
    return run_ranks(worker, 4, full, timeout=240)


@pytest.fixture
def results(request: pytest.FixtureRequest) -> Results:
    """Of the launch that the test is for."""
    return launched(full=is_full(request))


@pytest.mark.parametrize("name", marked([
    "zero1", "zero1 adamw", "zero1 clipped", "zero1 four stages", "clipped", "clipped replicas", "clipped slice",
    "client optimizer",
], FULL))  # fmt: skip
def test_fp32_equals_one_process(results: Any, name: str) -> None:
    for fp32, _ in results:
        measured = fp32[name]
        for what in ("loss", "gradients", "weights", *(["norms"] if "clipped" in name else [])):
            assert measured[what] <= 1e-5, f"{what} differ by {measured[what]:.1e}"


@pytest.mark.parametrize("name", marked([*BF16, "four stages"], FULL))
def test_bf16_is_as_exact_as_unsliced(results: Any, name: str) -> None:
    for _, bf16 in results:
        own = bf16[f"{name}/own"]
        for key, sliced in bf16.items():
            if not key.startswith(f"{name}/"):
                continue
            assert sliced["gradients"] <= 1.2 * own["gradients"], (
                f"{key}: {sliced['gradients']:.2e} > {own['gradients']:.2e}"
            )
            assert sliced["loss"] <= max(1.2 * own["loss"], LOSS_ROUNDING), f"{key}: {sliced} {own}"


@pytest.mark.parametrize("name", ["clipped/8", "clipped zero0/8"])
def test_bf16_is_clipped_by_the_true_norm(results: Any, name: str) -> None:
    for _, bf16 in results:
        assert bf16[name]["norms"] <= 1e-2
        assert bf16[name]["weights"] <= 1e-2
