"""Cutting of the micro-batches of a step, if it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ds_terapipe.config import AUTO, INTERLEAVED, TokenPipelineConfig
from ds_terapipe.schedule import Schedule
from ds_terapipe.tracing.chrome import Event

DEFAULT_SCHEDULE = "1f1b"


def named_schedule(config: TokenPipelineConfig) -> str:
    """Return the schedule of given slices, and of trials: the configured one, or the default of the placement."""
    if config.schedule != AUTO:
        return config.schedule
    return DEFAULT_SCHEDULE if config.stages_per_place == 1 else INTERLEAVED


def configured_slices(config: TokenPipelineConfig, stages: int) -> int | list[int] | str:
    """Return the configured slices; one for a stage alone without a plan, which has nothing to choose between."""
    alone = config.slices == AUTO and stages == 1 and config.plan_path is None
    return 1 if alone else config.slices


class SlicePlan(NamedTuple):
    """Slices of a step's micro-batches and their schedule, and the measurements of the step that decide something.

    Attributes:
        slices: their number, or their lengths in tokens.
        schedule: the order.
        timed: the seconds of the step count; the engine synchronizes with its device.
        recorded: so do its events.
        times_layers: so do the times of its single layers.
    """

    slices: int | tuple[int, ...]
    schedule: str | Schedule
    timed: bool = False
    recorded: bool = False
    times_layers: bool = False


class FixedSlices:
    """Fixed ``slices``: a number or a list of lengths."""

    def __init__(self, slices: int | Sequence[int], schedule: str) -> None:
        self._plan = SlicePlan(slices if isinstance(slices, int) else tuple(slices), schedule)

    def plan(self, lengths: Sequence[int], everywhere: Sequence[int]) -> SlicePlan:
        """Return the slice plan for micro-batches of these lengths."""
        return self._plan

    def now(self, everywhere: Sequence[int]) -> SlicePlan:
        """Return the current slice plan for an evaluation, which is neither measured nor planned for."""
        return self._plan

    def record_step(self, events: Sequence[Event], seconds: float) -> None:
        """Note the events and seconds of the step."""

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint."""
        return None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of a checkpoint."""
