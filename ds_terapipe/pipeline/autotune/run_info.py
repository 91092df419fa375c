"""Facts of a run that a plan depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ds_terapipe.config import AUTO, TokenPipelineConfig
from ds_terapipe.errors import ConfigError, named, shown
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.memory import GIGABYTE, gigabytes
from ds_terapipe.plan.placed import placement_text
from ds_terapipe.plan.result import Plan, compact
from ds_terapipe.schedule import Placement


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run that a plan is made for; the same on all ranks.

    Attributes:
        placement: of the stages; a place may have several.
        sequences: in a micro-batch.
        micro_batches: in a step.
        weights_once: weight gradients are made once per micro-batch where it is cut.
        loss_of_whole: the loss is made of a micro-batch's whole outputs.
        measured_on: model, types, devices, versions, ...: measurements hold where this is the same.
        multiple: number of tokens that every slice must be a multiple of.
    """

    placement: Placement
    sequences: int
    micro_batches: int
    weights_once: bool
    loss_of_whole: bool
    measured_on: Mapping[str, Any] = field(default_factory=dict)
    multiple: int = 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement.stages)

    def lengths(self, total: int, slices: int | Sequence[int]) -> tuple[int, ...]:
        """Return the lengths of the slices of a sequence."""
        return slice_lengths(total, slices, self.multiple)


Agreement: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Return the decision of rank 0, or raise its error, on every rank; collective."""


class Mismatch(NamedTuple):
    """Mismatch of a plan and a run: what the plan is for, and what it must be for."""

    theirs: str
    ours: str


def mismatch(plan: Plan, run: RunInfo, schedule: str, memory_gb: float | None) -> Mismatch | None:
    """Return why the plan is not for this run, None if it is; ``schedule`` and ``memory_gb`` as configured."""
    if schedule not in (AUTO, plan.schedule):
        return Mismatch(f'the schedule "{plan.schedule}"', "the given one")
    for name in ("stages", "sequences", "micro_batches"):
        if getattr(plan, name) != getattr(run, name):
            return Mismatch(f"{getattr(plan, name)} {name}", f"this run's {getattr(run, name)}")
    theirs, ours = placement_text(plan.placement), placement_text(run.placement)
    if theirs != ours:
        return Mismatch(theirs, f"this run's {ours}")
    if any(length % run.multiple for length in plan.slices):
        return Mismatch(f"slices of {compact(plan.slices)} tokens", f"multiples of {run.multiple}")
    needed = max((use.total for use in plan.memory), default=0.0)
    if memory_gb is not None and needed > memory_gb * GIGABYTE:
        return Mismatch(f"{gigabytes(needed):.3g} GB", f"memory_gb, {memory_gb:g}")
    return None


def given_plan(config: TokenPipelineConfig, run: RunInfo) -> Plan:
    """Return the plan of ``token_pipeline.plan_path``.

    Raises:
        ConfigError: it cannot be read, or is for another run.
    """
    path = config.plan_path
    assert path is not None
    with named("token_pipeline.plan_path"):
        plan = Plan.load(path)
    found = mismatch(plan, run, config.schedule, config.memory_gb)
    if found is not None:
        raise ConfigError(
            f"token_pipeline.plan_path: {path} is for {found.theirs}, must be for {found.ours}, "
            "use a plan made for it or leave plan_path out"
        )
    return plan


def differences(there: Any, here: Any, name: str = "") -> list[str]:
    """Return the differences of two JSON values as ``name there, here``: ``versions.torch "2.12", here "2.13"``."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        keys = [*here, *(key for key in there if key not in here)]
        parts = [(f"{name}.{key}" if name else key, there.get(key), here.get(key)) for key in keys]
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        parts = [(f"{name}[{index}]", *pair) for index, pair in enumerate(zip(there, here, strict=True))]
    else:
        return [] if there == here else [f"{name} {shown(there, 40)}, here {shown(here, 40)}"]
    return [line for key, a, b in parts for line in differences(a, b, key)]
