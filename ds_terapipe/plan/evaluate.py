"""Time of a step with given slices, by simulation of the actions that the engine executes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.schedule import (
    Action,
    Grid,
    Op,
    Placement,
    Schedule,
    Simulation,
    as_placement,
    complete,
    covered_slices,
    dependencies,
    given,
    order,
    simulate,
    with_weight_gradients,
)
from ds_terapipe.schedule.replay import durations_of

_Array = NDArray[np.float64]
Seconds: TypeAlias = Callable[[Action], float]


class SliceSeconds(NamedTuple):
    """Seconds of the slices of one cut: ``forward`` and ``backward`` [stages, slices], ``weights`` [stages] for a whole
    micro-batch, ``messages`` [stages - 1, slices]; those that a placement has no action for are not used."""

    forward: _Array
    backward: _Array
    weights: _Array
    messages: _Array


class Candidate(NamedTuple):
    """A step under a schedule: its simulated seconds, the tokens of each slice, and the order of a searched schedule."""

    seconds: float
    schedule: str
    lengths: tuple[int, ...]
    order: tuple[str, ...] | None = None

    @property
    def runs(self) -> str | Schedule:
        """The schedule, as `schedule.order` takes it."""
        return self.schedule if self.order is None else given(self.order)


class StepTimes:
    """Step times of a pipeline, by schedule and slices, without the part after a step's last action.

    Args:
        cost: of micro-batches of one size.
        stages: their placement, or how many there are, each on a place of its own.
        micro_batches: in a step.
        weights_once: weight gradients are made once per micro-batch where it is cut, as the engine's grids have it.
    """

    def __init__(self, cost: Cost, stages: int | Placement, micro_batches: int, weights_once: bool = False) -> None:
        self.cost, self.micro_batches, self.weights_once = cost, micro_batches, weights_once
        self.placement = as_placement(stages)
        self.stages = len(self.placement.stages)
        self._slices: dict[tuple[int, ...], SliceSeconds] = {}

    def grid(self, schedule: str | Schedule, slices: int) -> Grid:
        """Return the actions of a step with so many slices per micro-batch, the same that the engine runs."""
        grid = complete(order(schedule, self.placement, [slices] * self.micro_batches), self.placement)
        apart = None if self.weights_once and slices > 1 else ()
        return with_weight_gradients(grid, self.placement, apart)

    def slice_seconds(self, lengths: Sequence[int]) -> SliceSeconds:
        """Return the seconds of each slice on each stage. An uncut backward includes its weight gradients."""
        key = tuple(lengths)
        if key not in self._slices:
            length = np.array(key, dtype=float)
            context = np.array([0, *accumulate(key)][:-1], dtype=float)
            cost, stages = self.cost, range(self.stages)
            forward = np.array([cost.forward(stage, length, context) for stage in stages])
            backward = np.array([cost.backward(stage, length, context) for stage in stages])
            weights = np.zeros(self.stages)
            if self.weights_once:
                weights = np.array([cost.weights(stage, float(sum(key))) for stage in stages])
            if len(key) == 1:
                backward, weights = backward + weights[:, None], np.zeros(self.stages)
            messages = np.array([cost.message(boundary, length) for boundary in range(self.stages - 1)])
            self._slices[key] = SliceSeconds(forward, backward, weights, messages.reshape(self.stages - 1, len(key)))
        return self._slices[key]

    def seconds(self, schedule: str | Schedule, lengths: Sequence[int]) -> float:
        """Makespan of a step."""
        grid = self.grid(schedule, len(lengths))
        graph = dependencies(grid, self.placement)
        return max(graph.run(durations_of(graph, *self._durations(grid, lengths))))

    def bound(self, lengths: Sequence[int]) -> float:
        """No schedule takes less: a place must wait for the first slice, do its work, and have the last one done before it."""
        own, where = self.slice_seconds(lengths), self.placement
        frozen = where.forward_only
        backward, weights, hops = own.backward.copy(), own.weights.copy(), own.messages[:, 0].copy()
        backward[:frozen], weights[:frozen] = 0.0, 0.0
        hops[[not where.sends_forward(stage) for stage in range(self.stages - 1)]] = 0.0
        passes = (self.micro_batches * (own.forward.sum(1) + backward.sum(1))).tolist()
        # the first unit comes down through the stages before; the last one goes up through them, and an order may have left
        # any weight gradients for that time
        down = [0.0, *np.cumsum(own.forward[:-1, 0] + hops).tolist()]
        hops[:frozen] = 0.0
        up, once = [0.0, *np.cumsum(backward[:-1, 0] + hops).tolist()], weights.tolist()
        least = 0.0
        for place in range(where.places):
            stages = where.stages_on(place)
            last = next((stage for stage in stages if where.goes_backward(stage)), 0)  # of a place to go backward
            made = sum(once[stage] for stage in stages)
            after = max(self.micro_batches * made, up[last])
            least = max(least, down[stages[0]] + sum(passes[stage] for stage in stages) + after)
        return least

    def simulate(self, schedule: str | Schedule, lengths: Sequence[int]) -> Simulation:
        """Run the whole simulation: intervals, bubble and live tokens of each place."""
        grid = self.grid(schedule, len(lengths))
        compute, message = self._durations(grid, lengths)
        return simulate(grid, compute, message, lambda action: lengths[action.unit.slice], placement=self.placement)

    def by_action(self, lengths: Sequence[int], tokens: Callable[[Action], float]) -> tuple[Seconds, Seconds]:
        """Return the seconds of computations and of messages; ``tokens``: of an action that makes weight gradients."""
        forward, backward, weights, messages = (each.tolist() for each in self.slice_seconds(lengths))
        total = sum(lengths)

        def compute(action: Action) -> float:
            op, stage, unit, _ = action
            if op is Op.WEIGHT_GRADIENTS:
                return float(weights[stage] * tokens(action) / total)
            return float((forward if op is Op.FORWARD else backward)[stage][unit.slice])

        def message(action: Action) -> float:
            boundary = action.stage if action.op is Op.SEND_FORWARD else action.stage - 1
            return float(messages[boundary][action.unit.slice])

        return compute, message

    def _durations(self, grid: Grid, lengths: Sequence[int]) -> tuple[Seconds, Seconds]:
        """Return the same for a grid, whose weight gradients may be those of several slices."""
        counts = [len(lengths)] * self.micro_batches
        covered = {action: found for row in grid for action, found in covered_slices(row, counts).items()}
        return self.by_action(lengths, lambda action: sum(lengths[i] for i in covered[action]) / action.group.groups)
