"""Reshapes leave nothing behind: no process groups, threads, open files, shared memory, nor memory that grows."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer

from tests.elastic.training import Case, data_of, engine_of
from tests.pipeline.footprint import Footprint, footprint, settled
from tests.spawn import run_ranks

MEMORY = 0.02  # of the resident memory, from the tenth reshape to the fiftieth


def there_and_back(reshapes: int, model: str, precision: str) -> Case:
    """A reshape before every second step, with a prefix frozen from the first on."""
    resize = tuple((2 * n + 1, 1 if n % 2 == 0 else 2) for n in range(reshapes))
    return Case(model, "adamw", 2, ((1, 1),), resize, slices=2, steps=2 * reshapes + 2, batch=4, precision=precision)


def worker(
    rank: int, world_size: int, reshapes: int, settled_after: int, model: str, precision: str = "fp32"
) -> dict[str, Any]:
    case = there_and_back(reshapes, model, precision)
    engine, batches = engine_of(case), data_of(case)[0]
    share = case.batch // case.size // engine.dp_world_size
    own = batches[engine.grid.data_parallel_id * share :][:share]
    seen = []
    for step in range(case.steps):
        engine.train_batch(iter(own))
        seen.append(engine.num_stages)
        gc.collect()  # at one time in each round: what is allocated between garbage keeps whole pages
        if step == 2 * settled_after:  # as many reshapes have been
            torch.distributed.barrier()
            before = footprint()
    torch.distributed.barrier()
    after = settled(before)
    wrappers = sum(isinstance(thing, ZeROOptimizer) for thing in gc.get_objects())
    engine.destroy()
    return {"before": before, "after": after, "wrappers": wrappers, "reshapes": sum(a != b for a, b in pairwise(seen))}


def check(ranks: list[dict[str, Any]], reshapes: int, memory: float | None) -> None:
    for found in ranks:
        before, after = found["before"], found["after"]
        assert found["reshapes"] == reshapes
        grown = {name: getattr(after, name) - getattr(before, name) for name in Footprint._fields if name != "resident"}
        assert found["wrappers"] <= 1, "of the optimiser, from former shapes"
        assert not any(count > 0 for count in grown.values()), grown
        share = after.resident / before.resident - 1
        print(f"resident {share:.2%}, {grown}")
        assert memory is None or share < memory, f"resident memory grew by {share:.1%}"


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16 ZeRO-1"])
def test_a_few_reshapes_leave_nothing_behind(precision):
    check(run_ranks(worker, 2, 8, 4, "tied", precision), 8, None)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("processes", "precision"), [(2, "fp32"), (4, "fp32"), (2, "bf16 ZeRO-1"), (2, "ZeRO-1")])
def test_fifty_reshapes_leave_nothing_behind(processes, precision):
    check(run_ranks(worker, processes, 50, 10, "tied", precision, timeout=800.0), 50, MEMORY)
