"""Runs a grid without running it: when each action would start and end, or where places would wait for ever.

An action ends at the longest path to it. Waits depend on the grid alone, so they are worked out once (`dependencies`)
and serve any number of durations.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .actions import Action, Grid, Op, Unit
from .placement import Placement, placement_of


class Interval(NamedTuple):
    """When an action starts and ends, in the unit of the durations. A receive's is the time that the place waits."""

    start: float
    end: float


class Replay(NamedTuple):
    """Result of `replay`.

    ``intervals[place][i]`` belongs to ``grid[place][i]``; a place that got stuck has intervals up to the action before.
    ``stuck`` maps each place that did not reach its end to the index of the receive at which it waits.
    """

    intervals: list[list[Interval]]
    stuck: dict[int, int]

    @property
    def makespan(self) -> float:
        """The time at which the last place ends."""
        return max((row[-1].end for row in self.intervals if row), default=0.0)


class Dependencies(NamedTuple):
    """Dependencies between the actions of a grid, as a graph in topological order.

    Node 0 is the start of the step. Every other node ends when the later one of two nodes has ended (``after[i - 1]`` and
    ``also_after[i - 1]`` for node i) and its own time is over. A node is a computation, a receive (no time of its own) or
    the transfer of a message, which is listed with its send: a send itself takes no node, the place goes on at once.

    ``actions[i - 1]`` is what node i does; ``ends[place][j]`` is the node with which ``grid[place][j]`` ends; ``stuck`` is
    as in `Replay`.
    """

    actions: list[Action]
    after: list[int]
    also_after: list[int]
    ends: list[list[int]]
    stuck: dict[int, int]

    def run(self, durations: Sequence[float]) -> list[float]:
        """When each node ends, node 0 at 0.0 first; ``durations[i - 1]`` is the time of node i."""
        ended = [0.0]
        append = ended.append
        for first, second, seconds in zip(self.after, self.also_after, durations, strict=True):
            a, b = ended[first], ended[second]
            append((a if a > b else b) + seconds)
        return ended

    def intervals(self, ended: Sequence[float]) -> list[list[Interval]]:
        """Return the intervals of the grid's actions from the result of `run`."""
        rows = []
        for nodes in self.ends:
            times = [ended[node] for node in nodes]
            rows.append([Interval(start, end) for start, end in zip([0.0, *times], times, strict=False)])
        return rows


def replay(
    grid: Grid,
    duration: Callable[[Action], float],
    message: Callable[[Action], float] | None = None,
    placement: Placement | None = None,
) -> Replay:
    """Runs a grid with messages as an engine would: sends are buffered, a receive waits for the head of its channel.

    Each place starts an action as soon as the one before it ended and, for a receive, its message has arrived. A message
    leaves when it is sent and the ones sent before it on its link (from one place to another, whatever stages they are of) are
    through; the sender goes on at once.

    Args:
        grid: computations and messages, as `lower.with_messages` returns them.
        duration: time that a FORWARD, BACKWARD or WEIGHT_GRADIENTS action takes; it is not asked about messages.
        message: time that the message of a SEND action is on its way; none by default.
        placement: of the stages; None: one on each place.
    """
    graph = dependencies(grid, placement)
    ended = graph.run(durations_of(graph, duration, message))
    return Replay(graph.intervals(ended), graph.stuck)


def durations_of(
    graph: Dependencies, duration: Callable[[Action], float], message: Callable[[Action], float] | None = None
) -> list[float]:
    """The time of each node of a graph but node 0; arguments as in `replay`."""
    out = []
    for action in graph.actions:
        op = action[0]
        if op is _F or op is _B or op is _W:
            out.append(duration(action))
        elif message is None or op is _RECV_F or op is _RECV_B:
            out.append(0.0)
        else:
            out.append(message(action))
    return out


def dependencies(grid: Grid, placement: Placement | None = None) -> Dependencies:
    """Return the dependencies in a grid with messages; ``placement`` None: a stage on each place."""
    actions, after, also_after, ended, _ = graph = Dependencies([], [], [], [[] for _ in grid], {})
    places = [stage.place for stage in placement_of(len(grid), placement).stages]
    sent: dict[tuple[int, bool], deque[tuple[Unit, int]]] = defaultdict(deque)  # by receiving stage and direction
    waiting: dict[tuple[int, bool], int] = {}  # places, by the same
    last: dict[tuple[int, int], int] = defaultdict(int)  # the node of the last message from one place to another
    ready = deque(range(len(grid)))
    while ready:
        place = ready.popleft()
        row, ends = grid[place], ended[place]
        at = ends[-1] if ends else 0
        for index in range(len(ends), len(row)):
            action = row[index]
            op, stage, unit, _ = action
            also = at
            if op is _RECV_F or op is _RECV_B:
                channel = stage, op is _RECV_F
                messages = sent[channel]
                # A message out of order is as good as none: the receive waits for the one it names.
                if not messages or messages[0][0] != unit:
                    waiting[channel] = place
                    break
                also = messages.popleft()[1]
            sends = op is _SEND_F or op is _SEND_B
            node = len(actions) + 1
            if sends:
                channel = stage + 1 if op is _SEND_F else stage - 1, op is _SEND_F
                link = place, places[channel[0]]
                also, last[link] = last[link], node
                sent[channel].append((unit, node))
                if channel in waiting:
                    ready.append(waiting.pop(channel))
            actions.append(action)
            after.append(at)
            also_after.append(also)
            at = at if sends else node
            ends.append(at)
    graph.stuck.update((p, len(ends)) for p, ends in enumerate(ended) if len(ends) < len(grid[p]))
    return graph


# An enumeration's members are looked up slowly, and this is asked for every action.
_F, _B, _W = Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENTS
_RECV_F, _RECV_B, _SEND_F, _SEND_B = Op.RECV_FORWARD, Op.RECV_BACKWARD, Op.SEND_FORWARD, Op.SEND_BACKWARD
