"""Time of a step with given slices: the simulator, with parts shared by all plans computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_terapipe.plan.costs.cost import Cost
from ds_terapipe.schedule import (
    Action,
    Dependencies,
    Grid,
    Op,
    Placement,
    Simulation,
    covered_slices,
    dependencies,
    order,
    simulate,
    with_messages,
    with_weight_gradients,
)

_Array = NDArray[np.float64]


class SliceSeconds(NamedTuple):
    """Seconds of the slices of one cut: ``forward`` and ``backward`` [stages, slices], ``weights`` [stages] for a whole
    micro-batch, ``messages`` [stages - 1, slices]; those that a placement has no action for are not used."""

    forward: _Array
    backward: _Array
    weights: _Array
    messages: _Array


class _Graph(NamedTuple):
    """Dependencies of a grid, and where the time of each node stands.

    ``keys`` [nodes] points into the seconds of forward, backward and messages, then of the parts of micro-batches whose weight
    gradients one action makes, then 0. ``parts`` [3, parts]: their stage, first slice and stop.
    """

    dependencies: Dependencies
    keys: NDArray[np.intp]
    parts: NDArray[np.intp]


class StepTimes:
    """Step times of a pipeline, by schedule and slices, without the part after a step's last action.

    Args:
        cost: of micro-batches of one size.
        stages: number of stages.
        micro_batches: in a step.
        weights_once: weight gradients are made once per micro-batch where it is cut, as the engine's grids have it.
        placement: of so many stages; None: one on each place.

    Raises:
        ValueError: a placement of another number of stages.
    """

    def __init__(
        self,
        cost: Cost,
        stages: int,
        micro_batches: int,
        weights_once: bool = False,
        placement: Placement | None = None,
    ) -> None:
        self.cost, self.stages, self.micro_batches, self.weights_once = cost, stages, micro_batches, weights_once
        self.placement = Placement.plain(stages) if placement is None else placement
        if len(self.placement.stages) != stages:
            raise ValueError(f"placement: got {len(self.placement.stages)} stages, must be the pipeline's {stages}")
        self._graphs: dict[tuple[str, int], _Graph] = {}
        self._slices: dict[tuple[int, ...], SliceSeconds] = {}

    def grid(self, schedule: str, slices: int) -> Grid:
        """Return the actions of a step with so many slices per micro-batch, the same that the engine runs."""
        grid = with_messages(order(schedule, self.placement, [slices] * self.micro_batches), self.placement)
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

    def seconds(self, schedule: str, lengths: Sequence[int]) -> float:
        """Makespan of a step."""
        graph, keys, (stages, first, stop) = self._graph(schedule, len(lengths))
        own, starts = self.slice_seconds(lengths), np.array([0, *accumulate(lengths)])
        made = own.weights[stages] * (starts[stop] - starts[first]) / starts[-1]
        values = np.concatenate([own.forward.ravel(), own.backward.ravel(), own.messages.ravel(), made, np.zeros(1)])
        return max(graph.run(values[keys].tolist()))

    def nodes(self, schedule: str, slices: int) -> int:
        """Return the work of one call of `seconds`, in nodes of its graph."""
        return len(self._graph(schedule, slices)[0].after)

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

    def simulate(self, schedule: str, lengths: Sequence[int], held: Sequence[float] | None = None) -> Simulation:
        """Run the whole simulation; ``held``: bytes per token of a live unit on each stage."""
        own, grid = self.slice_seconds(lengths), self.grid(schedule, len(lengths))
        covered = self._covered(grid, len(lengths))

        def compute(action: Action) -> float:
            if action.op is Op.WEIGHT_GRADIENTS:
                return float(own.weights[action.stage]) * sum(lengths[i] for i in covered[action]) / sum(lengths)
            table = own.forward if action.op is Op.FORWARD else own.backward
            return float(table[action.stage, action.unit.slice])

        def message(action: Action) -> float:
            return float(own.messages[_boundary(action), action.unit.slice])

        def tokens(action: Action) -> int:
            return lengths[action.unit.slice]

        def bytes_(action: Action) -> float:
            return lengths[action.unit.slice] * held[action.stage] if held else 0.0

        return simulate(grid, compute, message, tokens, bytes_, self.placement)

    def _covered(self, grid: Grid, slices: int) -> dict[Action, range]:
        counts = [slices] * self.micro_batches
        return {action: found for row in grid for action, found in covered_slices(row, counts).items()}

    def _graph(self, schedule: str, slices: int) -> _Graph:
        """Return the dependencies of a grid, and where the time of each node stands."""
        key = schedule, slices
        if key not in self._graphs:
            grid = self.grid(schedule, slices)
            graph, table = dependencies(grid, self.placement), self.stages * slices
            first = {
                Op.FORWARD: 0,
                Op.BACKWARD: table,
                Op.SEND_FORWARD: 2 * table,
                Op.SEND_BACKWARD: 2 * table - slices,  # over the boundary before the stage
            }
            covered = self._covered(grid, slices)
            parts = {(each.stage, found.start, found.stop): 0 for each, found in covered.items()}
            parts = {part: 3 * table - slices + index for index, part in enumerate(parts)}
            nothing, keys = 3 * table - slices + len(parts), []
            for action in graph.actions:
                op, stage, unit = action
                if op is Op.WEIGHT_GRADIENTS:
                    keys.append(parts[stage, covered[action].start, covered[action].stop])
                else:
                    keys.append(first[op] + stage * slices + unit.slice if op in first else nothing)
            # millions of actions, kept for nothing, would keep the garbage collector busy
            slim = graph._replace(actions=[], ends=[])
            columns = np.array(list(parts), dtype=np.intp).reshape(-1, 3).T
            self._graphs[key] = _Graph(slim, np.array(keys, dtype=np.intp), columns)
        return self._graphs[key]


def _boundary(send: Action) -> int:
    return send.stage if send.op is Op.SEND_FORWARD else send.stage - 1
