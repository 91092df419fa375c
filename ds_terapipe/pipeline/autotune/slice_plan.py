"""Cutting of the micro-batches of a step, if it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ds_terapipe.tracing.chrome import Event

DEFAULT_SCHEDULE = "1f1b"


class SlicePlan(NamedTuple):
    """Slices of a step's micro-batches, and their schedule."""

    slices: int | tuple[int, ...]
    schedule: str


class FixedSlices:
    """Fixed ``slices``: a number or a list of lengths."""

    def __init__(self, slices: int | Sequence[int], schedule: str) -> None:
        self._plan = SlicePlan(slices if isinstance(slices, int) else tuple(slices), schedule)

    def plan(self, lengths: Sequence[int], everywhere: Sequence[int]) -> SlicePlan:
        """Return the slice plan for micro-batches of these lengths."""
        return self._plan

    def now(self, lengths: Sequence[int]) -> SlicePlan:
        """Return the current slice plan for an evaluation, which is neither measured nor planned for."""
        return self._plan

    @property
    def wants_events(self) -> bool:
        """Whether to record the step."""
        return False

    @property
    def wants_layers(self) -> bool:
        """Whether to time the step's single layers."""
        return False

    @property
    def wants_seconds(self) -> bool:
        """Whether the seconds of the step decide anything; if so, the engine synchronizes with the device."""
        return False

    def record_step(self, events: Sequence[Event], seconds: float) -> None:
        """Note the events and seconds of the step."""

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint."""
        return None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state of a checkpoint."""
