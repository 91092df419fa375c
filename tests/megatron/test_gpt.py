"""The GPT pipeline on DeepSpeed's own engine: every layout trains as one process does."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from tests.full import marked
from tests.megatron.common import (
    Model,
    allow_fp64,
    batches,
    build,
    deepspeed_config,
    relative,
    whole_weights,
)
from tests.spawn import run_ranks

STEPS = 3
MODELS = {
    "learned, tied": Model(),
    "rope, untied": Model(position="rope", tied=False, modern=True),
    "fp64": Model(position="rope", dtype=torch.float64),
    "fp64, recomputed": Model(dtype=torch.float64, checkpoint_interval=1),
    "bf16": Model(dtype=torch.bfloat16),
}
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2}


def train_all(rank: int, world: int, tensor: int, stages: int) -> dict[str, Any]:
    """Initial weights, losses and final weights of each model."""
    import deepspeed

    allow_fp64()
    replicas = world // (tensor * stages)
    results = {}
    for name, model in MODELS.items():
        pipeline = build(model, tensor=tensor, stages=stages)
        first = whole_weights(pipeline)
        engine, *_ = deepspeed.initialize(
            model=pipeline,
            model_parameters=list(pipeline.parameters()),
            config=deepspeed_config(model, replicas),
        )
        assert type(engine).__name__ == "PipelineEngine"
        if model.dtype == torch.float64:
            engine.communication_data_type = torch.float64  # it adds up the gradients of replicas in fp32
        data = batches(engine.grid.get_data_parallel_rank(), replicas)
        losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
        last = whole_weights(pipeline)
        results[name] = (first, losses, last) if rank == 0 else None
    return results


@cache
def trained(tensor: int, stages: int, replicas: int) -> dict[str, Any]:
    return run_ranks(train_all, tensor * stages * replicas, tensor, stages, timeout=240)[0]


@pytest.mark.parametrize(
    ("tensor", "stages", "replicas"), marked([(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2)], [(1, 2, 1)])
)
def test_every_layout_trains_as_one_process_does(tensor: int, stages: int, replicas: int) -> None:
    alone, spread = trained(1, 1, 1), trained(tensor, stages, replicas)
    for name, model in MODELS.items():
        first, losses, last = alone[name]
        other_first, other_losses, other_last = spread[name]
        assert other_first.keys() == first.keys()
        for key, weights in first.items():
            assert np.array_equal(other_first[key], weights), f"{name}: {key} starts from other weights"
        limit = LIMITS[model.dtype]
        # DeepSpeed passes losses on in fp32
        assert other_losses == pytest.approx(losses, rel=max(limit, 1e-6)), name
        for key, weights in last.items():
            assert relative(other_last[key], weights) <= limit, f"{name}: {key}"


def test_training_moves_every_weight() -> None:
    for name, (first, losses, last) in trained(1, 1, 1).items():
        assert losses[0] > 3.5 and len(set(losses)) == STEPS, name
        # a bf16 norm weight of 1 is too coarse for steps this small
        moved = [key for key in first if first[key].ndim > 1 or MODELS[name].dtype != torch.bfloat16]
        still = [key for key in moved if np.array_equal(first[key], last[key])]
        assert not still, f"{name}: {still} did not move"


def other_seed(rank: int, world: int) -> tuple[float, float]:
    one, two = whole_weights(build(Model(), seed=1)), whole_weights(build(Model(), seed=2))
    same = whole_weights(build(Model(), seed=1))
    key = "1.self_attention.linear_qkv.weight"
    assert not np.array_equal(one[key], one["2" + key[1:]]), "two layers with the same weights"
    return relative(same[key], one[key]), relative(two[key], one[key])


def test_weights_follow_the_seed() -> None:
    same, other = run_ranks(other_seed, 1)[0]
    assert same == 0.0 and other > 1.0
