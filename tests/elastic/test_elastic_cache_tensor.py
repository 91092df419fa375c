"""Each tensor-parallel rank keeps its own, and all of them read a micro-batch, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from ds_terapipe.elastic.cache import outputs as outputs_of_cache
from tests.elastic.tensor_training import TensorCase, data_of, engine_of
from tests.spawn import run_ranks

CASE = TensorCase(schedule=((2, 2), (8, 3)), saved=None)
PERIOD, LOST = 2, 6  # steps after which samples come again; the step before which a rank loses what it kept


def training(cache: bool, rank: int) -> tuple[list[float], list[Any]]:
    freeze = {"policy": "schedule", "frozen_layers": [list(pair) for pair in CASE.schedule]}
    block = {"freeze": freeze, "resize": {"policy": "off"}, "cache": {"enabled": cache}}
    engine = engine_of(CASE, stages=1, elastic_pipeline=block)
    losses, counts, data = [], [], data_of(CASE)
    for step in range(CASE.steps):
        if cache and step == LOST and rank == 1:
            kept = engine._shelf.cache
            kept.tiers[0].drop(kept._level.folder)
        losses.append(float(engine.train_batch(iter(data[step % PERIOD]))))
        if cache and engine._shelf is not None:
            for job in engine._shelf.cache._writing:
                job.result()
        counts.append(replace(engine.cache_counts))
    engine.destroy()
    return losses, counts


def both(rank: int, world_size: int) -> Any:
    outputs_of_cache.OutputCache._compare = lambda self: None
    return training(False, rank)[0], *training(True, rank)


def test_tensor_parallel_ranks_agree():
    ranks = run_ranks(both, 2, timeout=150)
    for computed, read, counts in ranks:
        assert torch.tensor(read).allclose(torch.tensor(computed), rtol=1e-5)
        samples = counts[3].computed // 2
        assert counts[3].kept == 2 * samples > 0 == counts[3].read
        assert counts[5].read > 0
        # what one rank has lost both compute; the other one has it still
        assert counts[7].read == counts[5].read and counts[7].computed - counts[5].computed == 2 * samples
        assert counts[9].continued == 2 * samples and counts[11].read > 0
    assert ranks[0][2] == ranks[1][2]
