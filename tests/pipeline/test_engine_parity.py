"""Losses, gradients and weights of sliced training equal those of one process, whatever the slicing, schedule and loss."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch

from ds_terapipe.schedule import NAMES
from tests.pipeline.models import (
    MaskedTokenLoss,
    focused_loss,
    gpt,
    masked_loss,
    mean_loss,
    steps_of,
    tied_gpt,
)
from tests.pipeline.training import ADAMW, SGD, Trace, build_engine, train, train_plain, worst
from tests.spawn import run_ranks

STEPS = 5
UNEVEN = [7, 2, 9, 1, 5]  # 24 tokens
OPTIMIZERS = {
    "sgd": (SGD, partial(torch.optim.SGD, lr=0.2)),
    "adamw": (ADAMW, partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1)),
}
MODELS = {"tied": tied_gpt, "untied": gpt}
LOSSES = {"masked": masked_loss, "per token": MaskedTokenLoss(), "no token sum": focused_loss, "mean": mean_loss}


class Case(NamedTuple):
    """One training. ``replicas`` x ``stages`` processes."""

    schedule: str
    slices: Any
    micro_batches: int
    loss: str = "masked"
    model: str = "tied"
    optimizer: str = "sgd"
    stages: int = 2
    replicas: int = 1
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        slices = "uneven" if isinstance(self.slices, list) else self.slices
        return (
            f"{self.schedule}-{slices}-M{self.micro_batches}-{self.loss}-{self.model}-{self.optimizer}"
            f"-PP{self.stages}xDP{self.replicas}-{str(self.dtype).removeprefix('torch.')}"
        )


TWO = [
    Case("1f1b", 1, 2),
    Case("1f1b", 2, 1, "per token", "untied", "adamw"),
    Case("1f1b", UNEVEN, 4, "no token sum", "tied", "adamw"),
    Case("1f1b", 24, 3, "mean", "untied", "adamw", dtype=torch.float64),
    Case("terapipe", 2, 4, "masked", "tied", "sgd"),
    *(Case(name, UNEVEN, 2, "per token", "tied", "adamw") for name in NAMES),
    Case("terapipe", 8, 1, "no token sum", "untied", "sgd"),
    Case("1f1b", UNEVEN, 2, "per token", dtype=torch.float64),
    Case("terapipe", UNEVEN, 1, "masked", "tied", "adamw", dtype=torch.float64),
]
FOUR = [
    Case("1f1b", UNEVEN, 2, "masked", "tied", "adamw", stages=4),
    Case("1f1b", 8, 4, "per token", "tied", "sgd", stages=4),
    Case("1f1b", UNEVEN, 2, "no token sum", "tied", "adamw", replicas=2),
    Case("terapipe", UNEVEN, 2, "masked", "tied", "sgd", replicas=2),
    Case("1f1b", 5, 2, "per token", "tied", "adamw", stages=4, dtype=torch.float64),
    Case("1f1b", 5, 2, "masked", "tied", "adamw", replicas=2, dtype=torch.float64),
]


def steps_for(case: Case) -> list[list[Any]]:
    return steps_of(STEPS, case.micro_batches * case.replicas, masked=case.loss != "mean")


@cache
def expected(model: str, loss: str, optimizer: str, micro_batches: int, dtype: torch.dtype) -> Trace:
    """The same training in this process."""
    masked = loss != "mean"
    return train_plain(
        MODELS[model](),
        LOSSES[loss],
        steps_of(STEPS, micro_batches, masked=masked),
        OPTIMIZERS[optimizer][1],
        dtype=dtype,
    )


def compare(case: Case, verify: bool) -> dict[str, float]:
    """Relative differences between this rank's run and one process."""
    engine = build_engine(
        MODELS[case.model](),
        LOSSES[case.loss],
        token_pipeline={"slices": case.slices, "schedule": case.schedule, "verify": verify},
        micro_batches=case.micro_batches,
        stages=case.stages,
        optimizer=OPTIMIZERS[case.optimizer][0],
        dtype=case.dtype,
    )
    got = train(engine, steps_for(case))
    reference = expected(case.model, case.loss, case.optimizer, case.micro_batches * case.replicas, case.dtype)
    losses = [abs(a - b) / abs(b) for a, b in zip(got.losses, reference.losses, strict=True)]
    # the loss of a float64 run is exact only where it was computed, and there it is this replica's own
    exact = case.dtype != torch.float64 or (engine.is_last_stage() and case.replicas == 1)
    engine.destroy()
    for step, full in zip(got.gradients, reference.gradients, strict=True):
        assert step.keys() == full.keys() & got.weights.keys() and step, "parameters without a gradient"
    return {
        "loss": max(losses) if exact else 0.0,
        "gradients": max(worst(a, b) for a, b in zip(got.gradients, reference.gradients, strict=True)),
        "weights": worst(got.weights, reference.weights),
    }


def run_all(rank: int, world_size: int, cases: list[Case], verify: bool) -> dict[str, dict[str, float]]:
    return {str(case): compare(case, verify) for case in cases}


def differences(cases: list[Case], mutant: str | None = None) -> list[dict[str, dict[str, float]]]:
    """Of each rank and case. A mutant has to get past the first batch, whose inspection would end the run for some."""
    (processes,) = {case.stages * case.replicas for case in cases}
    return run_ranks(run_all, processes, cases, mutant is None, timeout=240, mutant=mutant)


def tolerance(case: Case) -> float:
    return 1e-10 if case.dtype == torch.float64 else 1e-5


def off_by(mutant: str | None, *names: str) -> float:
    """The largest difference under a mutant, in tolerances; for ``tests.mutants``."""
    cases = {str(case): case for case in TWO + FOUR}
    measured = differences([cases[name] for name in names], mutant)
    return max(max(each[name].values()) / tolerance(cases[name]) for each in measured for name in names)


@pytest.fixture(scope="module")
def two() -> list[dict[str, dict[str, float]]]:
    return differences(TWO)


@pytest.fixture(scope="module")
def four() -> list[dict[str, dict[str, float]]]:
    return differences(FOUR)


def check(results: list[dict[str, dict[str, float]]], case: Case) -> None:
    for rank, result in enumerate(results):
        measured = result[str(case)]
        for what in ("loss", "gradients", "weights"):
            assert measured[what] <= tolerance(case), f"rank {rank}: {what} differ by {measured[what]:.1e}"


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_stages_equal_one_process(two: list[dict[str, dict[str, float]]], case: Case) -> None:
    check(two, case)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_processes_equal_one(four: list[dict[str, dict[str, float]]], case: Case) -> None:
    check(four, case)
