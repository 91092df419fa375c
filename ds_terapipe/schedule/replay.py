"""Runs a grid without running it: when each action would start and end, or where the stages would wait for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .actions import Action, Grid, Op


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


def replay(grid: Grid, duration: Callable[[Action], float]) -> Replay:
    """Runs a grid with messages as an engine would: sends are buffered, a receive waits for the head of its channel.

    Each stage starts an action as soon as the one before it ended and, for a receive, its message was sent, so an
    action's end is the longest path to it. Messages take no time of their own.

    Args:
        grid: computations and messages, as `lower.with_messages` returns them.
        duration: time that a FORWARD, BACKWARD or WEIGHT_GRADIENTS action takes; it is not asked about messages.
    """
    channels: dict[tuple[int, Op], deque[tuple[Action, float]]] = {}
    spans: list[list[Span]] = [[] for _ in grid]
    progress = True
    while progress:
        progress = False
        for stage, row in enumerate(grid):
            done = spans[stage]
            while len(done) < len(row):
                action = row[len(done)]
                now = done[-1].end if done else 0.0
                end = now + duration(action) if action.op.is_compute else now
                if action.op.is_receive:
                    channel = channels.get((stage, action.op))
                    # A message out of order is as good as none: the receive waits for the one it names.
                    if not channel or channel[0][0] != action:
                        break
                    end = max(now, channel.popleft()[1])
                elif action.op.is_send and (arrives := action.counterpart):
                    channels.setdefault((arrives.stage, arrives.op), deque()).append((arrives, end))
                done.append(Span(now, end))
                progress = True
    stuck = {stage: len(spans[stage]) for stage, row in enumerate(grid) if len(spans[stage]) < len(row)}
    return Replay(spans, stuck)
