"""What the choice of slices is made for, and what it needs of the engine around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds_terapipe.config import AUTO
from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.memory import MemoryModel
from ds_terapipe.plan.result import Plan


@dataclass(frozen=True)
class Situation:
    """What a plan is made for and what is known about the run: the same on all ranks.

    Attributes:
        stages: pipeline stages.
        sequences: in a micro-batch.
        micro_batches: in a step.
        weights_once: weight gradients are made once per micro-batch where it is cut.
        loss_of_whole: the loss is made of a micro-batch's whole outputs.
        measured_on: model, types, devices, versions, ...: measurements hold where this is the same.
    """

    stages: int
    sequences: int
    micro_batches: int
    weights_once: bool
    loss_of_whole: bool
    measured_on: Mapping[str, Any] = field(default_factory=dict)


class Agreement(Protocol):
    """Brings what rank 0 decided to all ranks; collective."""

    def __call__(self, decide: Callable[[], Any]) -> Any:
        """``decide()`` of rank 0, or its error, on every rank."""


class MemoryMeter(Protocol):
    """Measures one step."""

    def begin(self) -> None:
        """The step that begins is to be measured."""

    def end(self) -> tuple[MemoryModel | None, float | None]:
        """What it took on every stage, and the bytes that a stage may take, None without limit; collective."""


def check_plan(plan: Plan, situation: Situation, schedule: str, path: str) -> None:
    """Raise ConfigError where the plan of ``token_pipeline.plan_path`` is for another run, or not for this ``schedule``."""
    if schedule not in (AUTO, plan.schedule):
        raise ConfigError(
            f'token_pipeline.plan_path: {path} is for the schedule "{plan.schedule}", must be for the given one, use '
            f'"schedule": "{plan.schedule}" or another plan'
        )
    for name in ("stages", "sequences", "micro_batches"):
        if getattr(plan, name) != getattr(situation, name):
            raise ConfigError(
                f"token_pipeline.plan_path: {path} is for {getattr(plan, name)} {name}, must be for this run's "
                f"{getattr(situation, name)}, use a plan made for it or leave plan_path out"
            )
