"""Time and memory of a schedule whose actions and messages take the times of a cost function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .actions import Action, Grid, Op, Unit
from .lower import complete
from .placement import Placement, placement_of, row_word
from .replay import Dependencies, Interval, dependencies, durations_of
from .validate import ScheduleError


class PlaceResult(NamedTuple):
    """One place in a simulated step. ``busy + fill + imbalance + messages`` is the step's makespan, all in seconds.

    ``busy`` is computation. The rest is idle: ``messages`` is what would be gone if messages took no time; of what
    remains, ``fill`` is what the same grid leaves idle with equal stages and equal units (it fills and drains the
    pipeline), ``imbalance`` what comes on top because some stages or units take longer than others.

    Live is a unit from its forward to its backward on a stage that goes backward: ``peak_units`` counts the most pairs of
    stage and unit that are live at once, ``peak_tokens`` their tokens at most.
    """

    busy: float
    fill: float
    imbalance: float
    messages: float
    peak_units: int
    peak_tokens: int

    @property
    def idle(self) -> float:
        """Seconds of the step in which the place computes nothing."""
        return self.fill + self.imbalance + self.messages


class Simulation(NamedTuple):
    """A simulated step: ``intervals[place][i]`` belongs to ``grid[place][i]``, messages are in the grid; times in seconds."""

    grid: Grid
    intervals: list[list[Interval]]
    makespan: float
    places: tuple[PlaceResult, ...]

    @property
    def bubble(self) -> float:
        """Share of all places' time in which they compute nothing, 0 to 1."""
        return sum(self.bubble_shares.values())

    @property
    def bubble_shares(self) -> dict[str, float]:
        """The bubble in its parts, ``fill``, ``imbalance`` and ``messages``, as shares of all places' time."""
        whole = len(self.places) * self.makespan or 1.0
        parts = ("fill", "imbalance", "messages")
        return {name: sum(getattr(place, name) for place in self.places) / whole for name in parts}


def simulate(
    grid: Grid,
    compute: Callable[[Action], float],
    message: Callable[[Action], float] | None = None,
    tokens: Callable[[Action], int] | None = None,
    placement: Placement | None = None,
) -> Simulation:
    """Times a schedule exactly: every action ends at the longest path to it.

    Args:
        grid: one list of actions per place, as the engine executes them; messages are put in where it has none.
        compute: seconds of a FORWARD, BACKWARD or WEIGHT_GRADIENTS action.
        message: seconds of a SEND action's message: it leaves once the earlier ones from its place to the other are through,
            the sender goes on at once, the receiver waits. None: messages take no time.
        tokens: tokens of the unit of a FORWARD action; without it ``peak_tokens`` is 0.
        placement: of the stages; None: one on each place.

    Raises:
        ScheduleError: some places would wait for ever.
    """
    where = placement_of(len(grid), placement)
    whole = complete(grid, where)
    graph = dependencies(whole, where)
    if graph.stuck:
        word = row_word(where)
        waits = ", ".join(f"{word} {place} for {whole[place][at].counterpart}" for place, at in graph.stuck.items())
        raise ScheduleError(f"schedule: deadlock, {waits}; must be a grid that validate() accepts")
    durations = durations_of(graph, compute, message)
    ended = graph.run(durations)
    makespan = max(ended)
    busy = _busy(graph, durations, where)
    alone = [s if op in _COMPUTE else 0.0 for (op, *_), s in zip(graph.actions, durations, strict=True)]
    without_messages = max(graph.run(alone))
    even = _evened(graph, durations)
    even_busy = _busy(graph, even, where)
    even_makespan = max(graph.run(even))
    places = []
    for place, row in enumerate(whole):
        idle = max(without_messages - busy[place], 0.0)
        fill = min(idle, max(even_makespan - even_busy[place], 0.0))
        peaks = _peaks(row, tokens)
        places.append(PlaceResult(busy[place], fill, idle - fill, makespan - without_messages, *peaks))
    return Simulation(whole, graph.intervals(ended), makespan, tuple(places))


def _busy(graph: Dependencies, durations: Sequence[float], where: Placement) -> list[float]:
    of_stage = [0.0] * len(where.stages)
    for (op, stage, *_), seconds in zip(graph.actions, durations, strict=True):
        if op in _COMPUTE:
            of_stage[stage] += seconds
    return [sum(of_stage[stage] for stage in where.stages_on(place)) for place in range(where.places)]


def _evened(graph: Dependencies, durations: Sequence[float]) -> list[float]:
    """Durations of the same total for each kind of computation, the same for all its units and stages; no messages."""
    total, count = dict.fromkeys(_COMPUTE, 0.0), dict.fromkeys(_COMPUTE, 0)
    for (op, *_), seconds in zip(graph.actions, durations, strict=True):
        if op in _COMPUTE:
            total[op] += seconds
            count[op] += 1
    mean = {op: total[op] / count[op] if count[op] else 0.0 for op in _COMPUTE}
    return [mean.get(action[0], 0.0) for action in graph.actions]


def _peaks(row: Sequence[Action], tokens: Callable[[Action], int] | None) -> tuple[int, int]:
    """The most units and tokens that are live at once on a place."""
    trained = {action.stage for action in row if action.op is Op.BACKWARD}
    live: dict[tuple[int, Unit], int] = {}
    peak = peak_tokens = 0
    for action in row:
        op, stage, unit, _ = action
        if op is Op.FORWARD and stage in trained:
            live[stage, unit] = tokens(action) if tokens else 0
            peak, peak_tokens = max(peak, len(live)), max(peak_tokens, sum(live.values()))
        elif op is Op.BACKWARD:
            del live[stage, unit]
    return peak, peak_tokens


_COMPUTE = frozenset((Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENTS))
