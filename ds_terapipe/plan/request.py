"""A request for a plan: sizes of a step, limits, and what is known of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryModel, MemoryUse, memory_use
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.schedule import Placement, Schedule, as_placement


@dataclass(frozen=True)
class Request:
    """A request for a plan.

    Attributes:
        seq_length: tokens of a sequence.
        stages: the placement of the stages, or how many there are, each on a place of its own.
        micro_batches: in a step.
        schedule: ``auto``, or the only one that may be used.
        granularity: unequal slices are multiples of so many tokens, and the last one takes the remainder; equal lengths need
            not be.
        multiple: of so many tokens is every slice, as are the sequence and the granularity.
        min_length: shortest slice in tokens; by default the granularity.
        max_slice: longest slice in tokens, None without limit: measurements may reach no further.
        memory: memory model; None: memory is no limit.
        memory_gb: memory limit of each stage in 1e9 bytes; None: no limit.
        limit_name: name of that limit in errors.
        weights_once: weight gradients are made once per micro-batch where it is cut.
        overhead_s: seconds of a step after its last action: gradient reduction, optimiser.
        about: origin of the costs.
        search_s: seconds of the search for a better order, if the schedule is ``auto``, where it may save something; 0: none.
    """

    seq_length: int
    stages: int | Placement
    micro_batches: int
    schedule: str = "auto"
    granularity: int = 8
    multiple: int = 1
    min_length: int | None = None
    max_slice: int | None = None
    memory: MemoryModel | None = None
    memory_gb: float | None = None
    limit_name: str = "memory_gb"
    weights_once: bool = False
    overhead_s: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)
    search_s: float = 0.0

    def allows(self, lengths: Sequence[int]) -> bool:
        """Whether no slice is too short or too long, as far as the costs know."""
        return min(lengths) >= self.least and (self.max_slice is None or max(lengths) <= self.max_slice)

    @property
    def placement(self) -> Placement:
        """The stages on their places."""
        return as_placement(self.stages)

    def times(self, cost: Cost) -> StepTimes:
        """Return the step times with these costs."""
        return StepTimes(cost, self.placement, self.micro_batches, self.weights_once)

    def memory_of(self, schedule: str | Schedule, lengths: Sequence[int]) -> tuple[MemoryUse, ...]:
        """Return the peak of each place with these slices; empty where memory is not known."""
        if self.memory is None:
            return ()
        return memory_use(self.memory, schedule, lengths, self.micro_batches, self.weights_once, self.placement)

    def fits(self, schedule: str | Schedule, lengths: Sequence[int]) -> bool:
        """Whether these slices keep to the memory limit."""
        if self.memory is None or self.memory_gb is None:
            return True
        return max(use.total for use in self.memory_of(schedule, lengths)) <= self.memory_gb * GIGABYTE

    @property
    def least(self) -> int:
        """Shortest slice in tokens."""
        return min(self.seq_length, self.granularity if self.min_length is None else self.min_length)
