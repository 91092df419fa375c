"""FusedLamb on tensor-parallel GPTs of megatron-core modules: row, column and replicated parameters, with stages and ZeRO-1.

The replayed gradients are the engine's own, so that attention key biases, whose true gradient is zero and which LAMB turns
from rounding noise into whole steps, are compared like all other parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import ds_terapipe
from tests.megatron.common import Model, batches, build, deepspeed_config
from tests.optim.replay import FP32_SUM, SKIPPED, check_replay, lamb, poisoned, replayed, zero
from tests.spawn import launched

FP32, BF16 = Model(), Model(dtype=torch.bfloat16)
SETUPS: dict[str, tuple[Model, int, dict[str, Any]]] = {
    "fp32, two stages": (FP32, 2, {}),
    "fp32 zero1": (FP32, 1, zero(1)),
    "fp32, two stages, slices": (FP32, 2, {"token_pipeline": {"slices": 4}}),
    "bf16, two stages": (BF16, 2, {**zero(1), **FP32_SUM}),
    "bf16 zero1": (BF16, 1, zero(1)),
}


def worker(rank: int, world_size: int) -> dict[str, Any]:
    from ds_terapipe.megatron.parallel import destroy_parallel

    found = {}
    for name, (model, stages, config) in SETUPS.items():
        pipeline = build(model, tensor=2, stages=stages)
        replicas = pipeline.topology().get_dim("data")
        settings = deepspeed_config(model, replicas, optimizer=lamb(), gradient_clipping=0.3, **config)
        built, *_ = ds_terapipe.initialize(model=pipeline, config=settings)
        data = batches(built.grid.data_parallel_id, built.dp_world_size)

        def train(engine: Any, step: int, data: Any = data) -> None:
            engine.train_batch(data)

        cut = next(p for p in built.module.parameters() if getattr(p, "tensor_model_parallel", False))
        found[name] = replayed(built, train), poisoned(built, train, cut if rank == world_size - 1 else None)
        built.destroy()
        destroy_parallel()
    return found


ranks = launched(worker, 4, timeout=400)


@pytest.mark.parametrize("name", SETUPS)
def test_steps_are_those_of_one_unsharded_optimizer(ranks: list[dict[str, Any]], name: str) -> None:
    """And a nan on one tensor-parallel rank skips the step everywhere."""
    for rank in ranks:
        check_replay(rank[name][0], clipped=True)
        assert rank[name][1] == SKIPPED
