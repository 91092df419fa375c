"""FusedLamb on tensor-parallel GPTs of megatron-core modules: row, column and replicated parameters, with stages and ZeRO-1.

The replayed gradients are the engine's own, so that attention key biases, whose true gradient is zero and which LAMB turns
from rounding noise into whole steps, are compared like all other parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import ds_terapipe
from tests.megatron.common import Model, batches, build, deepspeed_config
from tests.optim.replay import lamb, off_by, replay, same, state
from tests.spawn import launched, run_ranks

CLOSE = 1e-6  # rounding of fp32, as in test_deepspeed_pipeline.py
CLIP = 0.3
ZERO1 = {"zero_optimization": {"stage": 1}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
FP32, BF16 = Model(), Model(dtype=torch.bfloat16)

SETUPS: dict[str, dict[str, Any]] = {
    "fp32, two stages": {"stages": 2, "clip": CLIP},
    "fp32 zero1": {"clip": CLIP, "config": ZERO1},
    "fp32, two stages, slices": {"stages": 2, "clip": CLIP, "config": {"token_pipeline": {"slices": 4}}},
    "bf16, two stages": {"model": BF16, "stages": 2, "config": {**ZERO1, **FP32_SUM}, "clip": CLIP},
    "bf16 zero1": {"model": BF16, "config": ZERO1, "clip": CLIP},
}


def engine(model: Model = FP32, stages: int = 1, clip: float = 0.0, config: dict[str, Any] | None = None) -> Any:
    pipeline = build(model, tensor=2, stages=stages)
    replicas = pipeline.topology().get_dim("data")
    settings = deepspeed_config(model, replicas, optimizer=lamb(), gradient_clipping=clip, **(config or {}))
    built, *_ = ds_terapipe.initialize(model=pipeline, config=settings)
    return built


def poisoned(built: Any, rank: int, train: Any) -> tuple[bool, int]:
    """A step in which a gradient of the second tensor-parallel rank of the last stage alone is inf."""
    before, skipped = state(built), built.skipped_steps
    hook = None
    if rank == built.world_size - 1:
        victim = next(p for p in built.module.parameters() if getattr(p, "tensor_model_parallel", False))
        hook = victim.register_hook(lambda g: g + float("inf"))
    train(0)
    if hook is not None:
        hook.remove()
    return same(before, state(built)), built.skipped_steps - skipped


def worker(rank: int, world_size: int, names: Sequence[str] = tuple(SETUPS)) -> dict[str, Any]:
    return dict(run(names, rank))


def run(names: Iterable[str], rank: int) -> Iterator[tuple[str, tuple[dict[str, float], tuple[bool, int]]]]:
    from ds_terapipe.megatron.parallel import destroy_parallel

    for name in names:
        built = engine(**SETUPS[name])
        data = batches(built.grid.data_parallel_id, built.dp_world_size)

        def train(step: int, built: Any = built, data: Any = data) -> None:
            built.train_batch(data)

        yield name, (replay(built, train, 3), poisoned(built, rank, train))
        built.destroy()
        destroy_parallel()


ranks = launched(worker, 4, timeout=400)


@pytest.mark.parametrize("name", SETUPS)
def test_steps_are_those_of_one_unsharded_optimizer(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        errors, _ = rank[name]
        assert errors["parameters"] <= CLOSE and errors["ratios"] <= CLOSE, errors
        assert errors["unequal"] == 0, "ratios differ between ranks"
        assert errors["unlike"] == 0, "gradients or weights differ between the ranks that hold them"
        assert errors["clipped"] == 1 and errors["norm"] <= 10 * CLOSE  # DeepSpeed adds the squares up in fp32
        assert errors["moved"] > 1e-4


@pytest.mark.parametrize("name", SETUPS)
def test_an_infinity_on_one_tensor_parallel_rank_skips_everywhere(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank[name][1] for rank in ranks] == [(True, 1)] * 4


def steps_off_by(mutant: str | None, *names: str) -> float:
    """The largest error of these setups' steps under a mutant, in tolerances; for ``tests.mutants``."""
    found = run_ranks(worker, 4, names, timeout=240, mutant=mutant)
    return max(off_by([errors for errors, _ in rank.values()], CLOSE) for rank in found)
