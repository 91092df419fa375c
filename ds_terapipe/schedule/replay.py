"""Runs a grid without running it: when each action would start and end, or where the stages would wait for ever.

An action ends at the longest path to it. What waits for what depends on the grid alone, so it is worked out once
(`dependencies`) and serves any number of durations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .actions import Action, Grid, Op, Unit


class Span(NamedTuple):
    """When an action starts and ends, in the unit of the durations. A receive's is the time that the stage waits."""

    start: float
    end: float


class Replay(NamedTuple):
    """What `replay` found.

    ``spans[stage][i]`` belongs to ``grid[stage][i]``; a stage that got stuck has spans up to the action before.
    ``stuck`` maps each stage that did not reach its end to the index of the receive at which it waits.
    """

    spans: list[list[Span]]
    stuck: dict[int, int]

    @property
    def makespan(self) -> float:
        """The time at which the last stage ends."""
        return max((row[-1].end for row in self.spans if row), default=0.0)


class Dependencies(NamedTuple):
    """What waits for what in a grid, as a graph in topological order.

    Node 0 is the start of the step. Every other node ends when the later one of two nodes has ended (``after[i - 1]`` and
    ``also_after[i - 1]`` for node i) and its own time is over. A node is a computation, a receive (no time of its own) or
    the transfer of a message, which is listed with its send: a send itself takes no node, the stage goes on at once.

    ``actions[i - 1]`` is what node i does; ``ends[stage][j]`` is the node with which ``grid[stage][j]`` ends; ``stuck`` is
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

    def spans(self, ended: Sequence[float]) -> list[list[Span]]:
        """The spans of the grid's actions from what `run` returns."""
        rows = []
        for nodes in self.ends:
            times = [ended[node] for node in nodes]
            rows.append([Span(start, end) for start, end in zip([0.0, *times], times, strict=False)])
        return rows


def replay(grid: Grid, duration: Callable[[Action], float], message: Callable[[Action], float] | None = None) -> Replay:
    """Runs a grid with messages as an engine would: sends are buffered, a receive waits for the head of its channel.

    Each stage starts an action as soon as the one before it ended and, for a receive, its message has arrived. A message
    leaves when it is sent and the ones sent before it on its channel (one direction between two neighbours) are through;
    the sender goes on at once.

    Args:
        grid: computations and messages, as `lower.with_messages` returns them.
        duration: time that a FORWARD, BACKWARD or WEIGHT_GRADIENTS action takes; it is not asked about messages.
        message: time that the message of a SEND action is on its way; none by default.
    """
    graph = dependencies(grid)
    ended = graph.run(durations_of(graph, duration, message))
    return Replay(graph.spans(ended), graph.stuck)


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


def dependencies(grid: Grid) -> Dependencies:
    """What waits for what in a grid with messages."""
    graph = Dependencies([], [], [], [[] for _ in grid], {})
    channels: dict[tuple[int, bool], _Channel] = {}
    ready = deque(range(len(grid)))
    while ready:
        stage = ready.popleft()
        _advance(grid[stage], graph, graph.ends[stage], channels, ready, stage)
    for stage, row in enumerate(grid):
        if len(graph.ends[stage]) < len(row):
            graph.stuck[stage] = len(graph.ends[stage])
    return graph


class _Channel:
    """Messages from one stage to a neighbour: those on their way, and who waits for one."""

    def __init__(self) -> None:
        self.messages: deque[tuple[Unit, int]] = deque()
        self.last = 0
        self.waiting: int | None = None


def _channel(channels: dict[tuple[int, bool], _Channel], receiver: int, forward: bool) -> _Channel:
    found = channels.get((receiver, forward))
    if found is None:
        found = channels[receiver, forward] = _Channel()
    return found


def _advance(
    row: Sequence[Action],
    graph: Dependencies,
    ends: list[int],
    channels: dict[tuple[int, bool], _Channel],
    ready: deque[int],
    index: int,
) -> None:
    """Takes one stage as far as it comes; stages whose message it sends are put into ``ready``."""
    actions, after, also_after = graph.actions, graph.after, graph.also_after
    at = ends[-1] if ends else 0
    for place in range(len(ends), len(row)):
        action = row[place]
        op, stage, unit = action
        if op is _F or op is _B or op is _W:
            actions.append(action)
            after.append(at)
            also_after.append(at)
            at = len(after)
        elif op is _RECV_F or op is _RECV_B:
            channel = _channel(channels, stage, op is _RECV_F)
            # A message out of order is as good as none: the receive waits for the one it names.
            if not channel.messages or channel.messages[0][0] != unit:
                channel.waiting = index
                return
            actions.append(action)
            after.append(at)
            also_after.append(channel.messages.popleft()[1])
            at = len(after)
        else:
            forward = op is _SEND_F
            channel = _channel(channels, stage + 1 if forward else stage - 1, forward)
            actions.append(action)
            after.append(at)
            also_after.append(channel.last)
            channel.last = len(after)
            channel.messages.append((unit, channel.last))
            if channel.waiting is not None:
                ready.append(channel.waiting)
                channel.waiting = None
        ends.append(at)


# An enumeration's members are looked up slowly, and this is asked for every action.
_F, _B, _W = Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENTS
_RECV_F, _RECV_B, _SEND_F = Op.RECV_FORWARD, Op.RECV_BACKWARD, Op.SEND_FORWARD
