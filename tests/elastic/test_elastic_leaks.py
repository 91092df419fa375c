"""Reshapes leave nothing behind: no process groups, threads, open files, shared memory, nor memory that grows."""

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


def worker(rank: int, world_size: int, reshapes: int, settled_after: int, precision: str) -> dict[str, Any]:
    """A reshape before every second step, there and back, with a prefix frozen from the first on."""
    resize = tuple((2 * n + 1, 1 if n % 2 == 0 else 2) for n in range(reshapes))
    case = Case("tied", "adamw", 2, ((1, 1),), resize, 2, steps=2 * reshapes + 2, batch=4, precision=precision)
    engine, batches, seen = engine_of(case), data_of(case)[0], []
    share = case.batch // case.size // engine.dp_world_size
    own = batches[engine.grid.data_parallel_id * share :][:share]
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


FEW, FIFTY = (4, 2), (50, 10)  # reshapes, and after how many of them nothing more may grow


@pytest.mark.parametrize(("processes", "reshapes", "precision"), [
    (2, FEW, "bf16 ZeRO-1"),
    *(pytest.param(n, FIFTY, p, marks=[pytest.mark.full, pytest.mark.timeout(900)])
      for n, p in ((2, "fp32"), (4, "fp32"), (2, "bf16 ZeRO-1"), (2, "ZeRO-1"))),
])  # fmt: skip
def test_reshapes_leave_nothing_behind(processes: int, reshapes: tuple[int, int], precision: str) -> None:
    for found in run_ranks(worker, processes, *reshapes, precision, timeout=800.0):
        before, after = found["before"], found["after"]
        assert found["reshapes"] == reshapes[0] and found["wrappers"] <= 1, "of the optimiser, from former shapes"
        grown = {name: getattr(after, name) - getattr(before, name) for name in Footprint._fields if name != "resident"}
        assert not any(count > 0 for count in grown.values()), grown
        assert reshapes == FEW or after.resident / before.resident - 1 < MEMORY
