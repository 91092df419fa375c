"""The columns of the elastic benchmark: frozen layers under DeepSpeed's engine and ours, in and out of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from tests.benchmarks import gpt
from tests.benchmarks.columns import (
    _DEEPSPEED,
    _OURS,
    COLUMNS,
    SETTLING,
    Column,
    Step,
    Workload,
    deepspeed_engine,
    training_step,
)
from tests.benchmarks.workers import Seat
from tests.pipeline.footprint import Footprint, footprint, settled

PLACES = 2
OURS_UNFROZEN = ("auto", *(name for name in COLUMNS if name.startswith("ours")))
DECIDED = 6  # steps after which a shape has been measured, chosen and gone to
Pairs = Sequence[tuple[int, int]]


def elastic_engine(
    workload: Workload, slices: int | str, freeze: Pairs, resize: Pairs | str, cached: bool = False
) -> Any:
    """Ours, launched with two stages; ``freeze`` and ``resize`` as in the block ``elastic_pipeline``, and its cache or not."""
    import ds_terapipe

    keys = {
        "token_pipeline": {"slices": slices, "verify": False},
        "elastic_pipeline": {
            "freeze": {"policy": "schedule", "frozen_layers": [list(pair) for pair in freeze]},
            "resize": {"policy": resize if isinstance(resize, str) else [list(pair) for pair in resize]},
            "cache": {"enabled": cached},
        },
    }
    return deepspeed_engine(ds_terapipe.initialize, PLACES, workload, keys)


@dataclass(frozen=True)
class PrepareElastic:
    """``frozen`` layer modules frozen by the schedule, and ``stages`` from the first step on; None: as launched; or a policy."""

    slices: int | str
    frozen: int
    stages: int | str | None
    cached: bool = False

    def __call__(self, rank: int, world: int, workload: Workload) -> Step:
        resize = "off" if self.stages is None else self.stages if isinstance(self.stages, str) else [(0, self.stages)]
        engine = elastic_engine(workload, self.slices, [(0, self.frozen)], resize, self.cached)
        step = training_step(engine, workload)
        return partial(_reading, engine, step) if self.cached else step


def _reading(engine: Any, step: Step) -> float:
    """A step in which nothing frozen is computed, or an error."""
    before = replace(engine.cache_counts)
    loss = step()
    after = engine.cache_counts
    # the first two times that a micro-batch is seen it is computed, to be kept and to be compared
    first = before.read == 0 or engine.global_steps <= DECIDED
    if not first and (after.read == before.read or after.computed > before.computed):
        raise RuntimeError(f"the cache was not read: {after} after {before}")
    return loss


@dataclass(frozen=True)
class PrepareDeepSpeed:
    """DeepSpeed's engine with ``frozen`` layer modules' ``requires_grad`` turned off.

    ``second``: first layer module of the second stage; None: no pipeline, two replicas of the whole model.
    """

    frozen: int
    second: int | None

    def __call__(self, rank: int, world: int, workload: Workload) -> Step:
        import deepspeed

        if self.second is None:
            engine = deepspeed_engine(deepspeed.initialize, 1, workload, {}, self.frozen)
            mine = workload.of_replica(rank, world)
            return lambda: float(engine.train_batch(mine))
        boundaries = [0, self.second, workload.shape.modules]
        engine = deepspeed_engine(deepspeed.initialize, world, workload, {}, self.frozen, boundaries)
        return training_step(engine, workload)


def of_deepspeed(shape: gpt.Shape, frozen: int) -> list[Column]:
    """Its partitions that run, stages with trained parameters on each, and two that put least on the first stage; replicas."""
    trains = f"all but {frozen}"
    seconds = range(frozen + 1, shape.modules)[:2]
    return [
        *(
            Column(f"deepspeed{at}", f"DS cut at {at}", PLACES, PrepareDeepSpeed(frozen, at), _DEEPSPEED, trains=trains)
            for at in seconds
        ),
        Column("replicas", "DS replicas", PLACES, PrepareDeepSpeed(frozen, None), _DEEPSPEED, trains=trains),
    ]


def of_ours(frozen: int, slices: Sequence[int | str]) -> list[Column]:
    """Unfrozen, frozen in two stages, in two replicas, and as what is measured says, each with these slices."""
    found = []
    for count in slices:
        settling = SETTLING if count == "auto" else 0
        found += [
            COLUMNS["auto" if count == "auto" else f"ours{count}"],
            *(
                Column(
                    f"{name}-{count}",
                    f"{name} {count}",
                    PLACES,
                    PrepareElastic(count, frozen, stages, name == "cached"),
                    _OURS,
                    max(settling, DECIDED if name in ("measured", "cached") else 0),
                    trains=f"all but {frozen}",
                )
                for name, stages in (("kept", None), ("reshaped", 1), ("cached", 1), ("measured", "measured"))
            ),
        ]
    return found


@dataclass(frozen=True)
class Timed:
    """A step: stages that it ran on, and seconds, a transition before it included."""

    stages: int
    seconds: float


def timed_transitions(
    seat: Seat, workload: Workload, slices: int | str, frozen: int, stay: int, count: int
) -> list[Timed]:
    """Request: the steps of a run that goes ``count`` times to one stage and back, ``stay`` steps in each shape."""
    resize = [(number * stay, 1 + (number + 1) % 2) for number in range(1, 2 * count)]
    engine = elastic_engine(workload, slices, [(stay, frozen)], resize)
    iterator, steps = workload.endlessly(), []
    for _ in range(2 * count * stay):
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(iterator)
        steps.append(Timed(engine.num_stages, time.perf_counter() - start))
    engine.destroy()
    return steps


def reshaped_often(seat: Seat, workload: Workload, slices: int, frozen: int, count: int) -> tuple[Footprint, Footprint]:
    """Request: what the process holds after the tenth of ``count`` reshapes and after the last, a step between two."""
    resize = [(step, 1 + (step + 1) % 2) for step in range(1, count + 1)]
    engine = elastic_engine(workload, slices, [(1, frozen)], resize)
    iterator, tenth = workload.endlessly(), None
    for step in range(count + 1):
        engine.train_batch(iterator)
        if step == min(10, count // 2):
            dist.barrier()
            tenth = footprint()
    assert tenth is not None
    dist.barrier()
    return tenth, settled(tenth)
