"""What a schedule takes, in time and in memory, when its actions and messages take the times that a cost function says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .actions import Action, Grid, Op
from .lower import has_messages, with_messages
from .replay import Dependencies, Span, dependencies, durations_of
from .validate import ScheduleError


class StageResult(NamedTuple):
    """One stage in a simulated step. ``busy + fill + imbalance + messages`` is the step's makespan, all in seconds.

    ``busy`` is computation. The rest is idle: ``messages`` is what would be gone if messages took no time; of what
    remains, ``fill`` is what the same grid leaves idle with equal stages and equal units (it fills and drains the
    pipeline), ``imbalance`` what comes on top because some stages or units take longer than others.

    Live is a unit from its forward to its backward: ``peak_units`` counts the most that are live at once,
    ``peak_tokens`` and ``peak_bytes`` are the same peak in the units of `simulate`'s ``tokens`` and ``held``.
    """

    busy: float
    fill: float
    imbalance: float
    messages: float
    peak_units: int
    peak_tokens: int
    peak_bytes: float

    @property
    def idle(self) -> float:
        """Seconds of the step in which the stage computes nothing."""
        return self.fill + self.imbalance + self.messages


class Simulation(NamedTuple):
    """A simulated step: ``spans[stage][i]`` belongs to ``grid[stage][i]``, messages are in the grid; times in seconds."""

    grid: Grid
    spans: list[list[Span]]
    makespan: float
    stages: tuple[StageResult, ...]

    @property
    def bubble(self) -> float:
        """Share of all stages' time in which they compute nothing, 0 to 1."""
        return self._share(sum(stage.idle for stage in self.stages))

    @property
    def bubble_shares(self) -> dict[str, float]:
        """The bubble in its parts, ``fill``, ``imbalance`` and ``messages``, as shares of all stages' time."""
        return {
            "fill": self._share(sum(stage.fill for stage in self.stages)),
            "imbalance": self._share(sum(stage.imbalance for stage in self.stages)),
            "messages": self._share(sum(stage.messages for stage in self.stages)),
        }

    def _share(self, seconds: float) -> float:
        whole = len(self.stages) * self.makespan
        return seconds / whole if whole else 0.0


def simulate(
    grid: Grid,
    compute: Callable[[Action], float],
    message: Callable[[Action], float] | None = None,
    tokens: Callable[[Action], int] | None = None,
    held: Callable[[Action], float] | None = None,
) -> Simulation:
    """Times a schedule exactly: every action ends at the longest path to it.

    Args:
        grid: one list of actions per stage, as the engine executes them; messages are put in where it has none.
        compute: seconds of a FORWARD, BACKWARD or WEIGHT_GRADIENTS action.
        message: seconds of a SEND action's message: it leaves once the earlier ones of its channel are through, the sender
            goes on at once, the receiver waits. None: messages take no time.
        tokens: tokens of the unit of a FORWARD action; without it ``peak_tokens`` is 0.
        held: bytes that the unit of a FORWARD action holds on its stage until its backward; without it ``peak_bytes`` is 0.

    Raises:
        ScheduleError: some stages would wait for ever.
    """
    complete: Grid = grid if has_messages(grid) or len(grid) <= 1 else with_messages(grid)
    graph = dependencies(complete)
    if graph.stuck:
        waits = ", ".join(f"stage {stage} for {complete[stage][at].counterpart}" for stage, at in graph.stuck.items())
        raise ScheduleError(f"schedule: deadlock, {waits}; must be a grid that validate() accepts")
    durations = durations_of(graph, compute, message)
    ended = graph.run(durations)
    makespan = max(ended)
    busy = _busy(graph, durations, len(complete))
    without_messages = max(graph.run(_computations(graph, durations)))
    even = _evened(graph, durations)
    even_busy = _busy(graph, even, len(complete))
    even_makespan = max(graph.run(even))
    stages = []
    for stage, row in enumerate(complete):
        idle = max(without_messages - busy[stage], 0.0)
        fill = min(idle, max(even_makespan - even_busy[stage], 0.0))
        peaks = _peaks(row, tokens, held)
        stages.append(StageResult(busy[stage], fill, idle - fill, makespan - without_messages, *peaks))
    return Simulation(complete, graph.spans(ended), makespan, tuple(stages))


def _busy(graph: Dependencies, durations: Sequence[float], stages: int) -> list[float]:
    busy = [0.0] * stages
    for (op, stage, _), seconds in zip(graph.actions, durations, strict=True):
        if op in _COMPUTE:
            busy[stage] += seconds
    return busy


def _computations(graph: Dependencies, durations: Sequence[float]) -> list[float]:
    """The same durations, with messages that take no time."""
    return [s if action[0] in _COMPUTE else 0.0 for action, s in zip(graph.actions, durations, strict=True)]


def _evened(graph: Dependencies, durations: Sequence[float]) -> list[float]:
    """Durations of the same total for each kind of computation, the same for all its units on all stages; no messages."""
    total, count = dict.fromkeys(_COMPUTE, 0.0), dict.fromkeys(_COMPUTE, 0)
    for (op, _, _), seconds in zip(graph.actions, durations, strict=True):
        if op in _COMPUTE:
            total[op] += seconds
            count[op] += 1
    mean = {op: total[op] / count[op] if count[op] else 0.0 for op in _COMPUTE}
    return [mean.get(action[0], 0.0) for action in graph.actions]


def _peaks(
    row: Sequence[Action], tokens: Callable[[Action], int] | None, held: Callable[[Action], float] | None
) -> tuple[int, int, float]:
    """The most units, tokens and bytes that are live at once on a stage."""
    live = live_tokens = 0
    live_bytes = 0.0
    peak, peak_tokens, peak_bytes = 0, 0, 0.0
    forward: dict[tuple[int, int], tuple[int, float]] = {}
    for action in row:
        if action.op is Op.FORWARD:
            size = tokens(action) if tokens else 0, held(action) if held else 0.0
            forward[action.unit] = size
            live, live_tokens, live_bytes = live + 1, live_tokens + size[0], live_bytes + size[1]
            peak, peak_tokens = max(peak, live), max(peak_tokens, live_tokens)
            peak_bytes = max(peak_bytes, live_bytes)
        elif action.op is Op.BACKWARD:
            size = forward.pop(action.unit)
            live, live_tokens, live_bytes = live - 1, live_tokens - size[0], live_bytes - size[1]
    return peak, peak_tokens, peak_bytes


_COMPUTE = frozenset((Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENTS))
