"""The headline: a token-sliced Megatron GPT trains as one plain PyTorch process does, in every layout.

Losses, all gradients of the first step and weights after five optimiser steps, ||a - b|| / ||b|| per tensor. ``make test``
covers all pairs of values of the factors below, and all kinds of attention in uneven slices, ``make test-full`` their whole
product. One spawn per layout runs it all, and every step asserts which slices ran, in every layer.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import distributed as dist

pytest.importorskip("megatron.core")

from tests.megatron.common import (
    MICRO_BATCH,
    SEQ,
    Model,
    allow_fp64,
    batches,
    build,
    deepspeed_config,
    relative,
    whole_tensors,
)
from tests.ran import lengths_of, watched
from tests.spawn import run_ranks

STEPS = 5
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
LAYOUTS = {"PP2": (1, 2, 1), "PP4": (1, 4, 1), "PP2xDP2": (1, 2, 2), "PP2xTP2": (2, 2, 1)}  # tensor, stages, replicas
UNEVEN = (5, 1, 4, 2, 4)
FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": ("terapipe", "1f1b"),
    "slices": (1, 2, UNEVEN, 8),
    "micro_batches": (1, 2, 4),
    "position": ("learned", "rope"),
    "queries": ("alone", "grouped"),
    "optimizer": ("SGD", "AdamW"),
    "dtype": (torch.float32, torch.float64),
}


class Case(NamedTuple):
    """One training run: a value of each factor."""

    schedule: str
    slices: Any
    micro_batches: int
    position: str
    queries: str
    optimizer: str
    dtype: torch.dtype

    def engine(self) -> tuple[Any, ...]:
        """The factors that need an engine of their own."""
        return self.position, self.queries, self.optimizer, self.dtype

    def reference(self) -> tuple[Any, ...]:
        """The factors that the unsliced run depends on."""
        return (*self.engine(), self.micro_batches)


def product() -> list[Case]:
    return [Case(*values) for values in itertools.product(*FACTORS.values())]


def all_pairs() -> list[Case]:
    """Few cases among which every pair of values of two factors occurs, and every kind of attention in uneven slices.

    Greedy, always the same.
    """
    wanted = {combination for case in product() for combination in _combinations(case)}
    chosen = []
    while wanted:
        best = max(product(), key=lambda case: len(wanted & _combinations(case)))
        chosen.append(best)
        wanted -= _combinations(best)
    return chosen


def _combinations(case: Case) -> set[Any]:
    pairs = set(itertools.combinations(enumerate(case), 2))
    return pairs | {("uneven", case.position, case.queries)} if case.slices == UNEVEN else pairs


def model_of(position: str, queries: str, dtype: torch.dtype) -> Model:
    """Learned positions come with tied embeddings, rotary ones untied; grouped queries with RMS norm and SwiGLU."""
    return Model(position=position, tied=position == "learned", modern=queries == "grouped", dtype=dtype)


def new_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    # eps above the rounding noise of fp32 gradients (1e-9 here): below it AdamW makes whole steps out of that noise
    return torch.optim.SGD(parameters, lr=0.1) if name == "SGD" else torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6)


class Result(NamedTuple):
    losses: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def train_alone(rank: int, world: int, keys: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], Result]:
    """Plain PyTorch: the layers one behind the other in one process, autograd, an optimiser."""
    results = {}
    for key in keys:
        position, queries, optimizer, dtype, micro_batches = key
        pipeline = build(model_of(position, queries, dtype))
        step = new_optimizer(optimizer, pipeline.parameters())
        data, losses, gradients = batches(), [], {}
        for number in range(STEPS):
            step.zero_grad()
            total = 0.0
            for _ in range(micro_batches):
                hidden, labels = next(data)
                for layer in pipeline.forward_funcs:
                    hidden = layer(hidden)
                loss = pipeline.loss_fn(hidden, labels) / micro_batches
                loss.backward()
                total += loss.item()
            losses.append(total)
            if number == 0:
                gradients = whole_tensors(pipeline, lambda p: p.grad)
            step.step()
        results[key] = Result(losses, gradients, whole_tensors(pipeline))
    return results


def train_sliced(
    rank: int, world: int, layout: tuple[int, int, int], cases: list[Case], defective: bool
) -> dict[Case, Result] | None:
    """The same through the engine; one engine serves all cases that differ in slicing, schedule and micro-batches only.

    A ``defective`` one, which has a mutant in it, has to get to the comparison past the inspection of the first batch, which
    would end some runs, and past copies of a weight that differ.
    """
    allow_fp64()
    results = {}
    for _, group in itertools.groupby(sorted(cases, key=lambda case: str(case.engine())), key=Case.engine):
        runs = list(group)
        runner = _Runner(layout, runs[0], defective)
        for case in runs:
            results[case] = runner.train(case)
        runner.engine.destroy()
    return results if rank == 0 else None


class _Runner:
    def __init__(self, layout: tuple[int, int, int], case: Case, defective: bool) -> None:
        import ds_terapipe

        tensor, stages, self.replicas = layout
        self.same = not defective
        model = model_of(case.position, case.queries, case.dtype)
        self.pipeline = build(model, tensor=tensor, stages=stages)
        extra = {"gradient_accumulation_steps": 1, "token_pipeline": {"slices": 1, "verify": not defective}}
        config = {**deepspeed_config(model, 1, **extra)}
        del config["optimizer"]
        optimizer = new_optimizer(case.optimizer, self.pipeline.parameters())
        self.engine, *_ = ds_terapipe.initialize(model=self.pipeline, optimizer=optimizer, config=config)
        self.engine.communication_data_type = case.dtype  # DeepSpeed would round fp64 gradients to fp32 to reduce them
        self.first = [p.detach().clone() for p in self.pipeline.parameters()]

    def train(self, case: Case) -> Result:
        engine, slices = self.engine, case.slices if isinstance(case.slices, int) else list(case.slices)
        for parameter, first in zip(self.pipeline.parameters(), self.first, strict=True):
            parameter.data.copy_(first)
        engine.optimizer.state.clear()
        engine.set_slices(slices, case.schedule)
        # micro-batches are per replica; the data go round the replicas, so that the global batch is the reference's
        engine.set_train_batch_size(max(case.micro_batches, self.replicas) * MICRO_BATCH)
        data = batches(engine.grid.get_data_parallel_rank(), self.replicas)
        losses, gradients = [], {}
        cut = [lengths_of(SEQ, case.slices)] * max(case.micro_batches // self.replicas, 1)
        layers = sum(type(layer).__name__ == "GPTLayer" for layer in self.pipeline.forward_funcs)

        def keep_gradients(*args: Any) -> None:
            if not gradients:
                gradients.update(whole_tensors(self.pipeline, lambda p: p.grad, self.same))

        handle = engine.optimizer.register_step_pre_hook(keep_gradients)
        with watched(engine) as ran:
            for _ in range(STEPS):
                engine.train_batch(data)
                losses.append(self._loss())
                ran.check(cut, layers)
        handle.remove()
        return Result(losses, gradients, whole_tensors(self.pipeline, same=self.same))

    def _loss(self) -> float:
        # DeepSpeed rounds the loss to fp32 on its way to the other stages
        engine, everyone = self.engine, [None] * dist.get_world_size()
        mine = None if engine.total_loss is None else float(engine.total_loss) / engine.micro_batches
        dist.all_gather_object(everyone, mine)
        losses = [loss for loss in everyone if loss is not None]
        return sum(losses) / len(losses)


class Difference(NamedTuple):
    """Of a sliced run to the plain one: a relative difference, in tolerances."""

    factor: float
    case: Case
    what: str


def differences(name: str, cases: list[Case], mutant: str | None = None) -> list[Difference]:
    """All that can be compared in these cases."""
    tensor, stages, replicas = LAYOUTS[name]
    # with two replicas a global batch of one micro-batch does not exist: it is two
    keys = {case: case._replace(micro_batches=max(case.micro_batches, replicas)).reference() for case in cases}
    alone = references(tuple(sorted(set(keys.values()), key=str)))
    processes = tensor * stages * replicas
    arguments = LAYOUTS[name], cases, mutant is not None
    sliced = run_ranks(train_sliced, processes, *arguments, timeout=3000, mutant=mutant)[0]
    found = []
    for case in cases:
        want, got, limit = alone[keys[case]], sliced[case], LIMITS[case.dtype]
        worst = max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True))
        found.append(Difference(worst / limit, case, "losses"))
        for what in ("gradients", "weights"):
            ours, theirs = getattr(got, what), getattr(want, what)
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                difference = relative(_without_key_bias(key, ours[key]), _without_key_bias(key, value))
                found.append(Difference(difference / limit, case, f"{what} of {key}"))
    return found


def compared(name: str, cases: list[Case]) -> None:
    problems = [each for each in differences(name, cases) if not each.factor <= 1.0]
    assert not problems, "\n".join(f"{name} {case}: {what} differ by {n:.1f} tolerances" for n, case, what in problems)


def off_by(mutant: str | None, layout: str, position: str, queries: str, dtype: str) -> float:
    """The largest difference under a mutant, in tolerances, of uneven slices; for ``tests.mutants``."""
    case = Case("1f1b", UNEVEN, 2, position, queries, "SGD", getattr(torch, dtype))
    return max(each.factor for each in differences(layout, [case], mutant))


def _without_key_bias(name: str, value: np.ndarray) -> np.ndarray:
    """Attention key biases have a true gradient of zero; Adam turns its rounding noise into full steps."""
    if not name.endswith("linear_qkv.bias"):
        return value
    return value.reshape(4, 3, -1)[:, [0, 2]]  # per head: query, key, value


@cache
def references(keys: tuple[Any, ...]) -> dict[tuple[Any, ...], Result]:
    return run_ranks(train_alone, 1, list(keys), timeout=3000)[0]


def test_uneven_slices_fit() -> None:
    assert sum(UNEVEN) == SEQ


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_pairs(layout: str) -> None:
    compared(layout, all_pairs())


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_product(layout: str) -> None:
    compared(layout, product())
