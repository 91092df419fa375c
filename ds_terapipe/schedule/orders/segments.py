"""From an order of stages on places of their own to any placement.

Stages that follow each other on one place are one *segment*: a unit goes forward through them one after the other, and backward
in reverse. The segments are ordered as if each had a place of its own, and that order is timed with computations of equal
length. Segments of one place then take turns as they come in time: what an action waits for ends before it starts, so the merged
rows can run, and messages between segments are taken about as fast as they are sent. Forward-only segments are timed with
backward passes, which are dropped at the end, so that they run no further ahead than others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..actions import Action, Op
from ..lower import with_messages
from ..placement import Placement
from ..replay import replay

RowOf = Callable[[int, int, Sequence[int]], list[Action]]
"""The order of one of so many stages, each on a place of its own: from stage, number of stages and slices of micro-batches."""


class Segment(NamedTuple):
    """Stages ``first`` to ``stop - 1``, on one place; the stages before and after them are on others."""

    place: int
    first: int
    stop: int


def segments(placement: Placement) -> list[Segment]:
    """The segments of a model, in model order."""
    starts = [stage for stage in range(len(placement.stages)) if stage == 0 or placement.receives_forward(stage)]
    return [
        Segment(placement.place_of(first), first, stop)
        for first, stop in zip(starts, [*starts[1:], len(placement.stages)], strict=True)
    ]


def placed(row_of: RowOf, placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    """The computations of a step on each place."""
    parts = segments(placement)
    rows = [row_of(index, len(parts), slices) for index in range(len(parts))]
    if placement.is_usual:
        return rows
    if not placement.is_plain:
        rows = _merged(rows, parts, placement)
    return [[done for action in row for done in _expand(action, parts[action.stage], placement)] for row in rows]


def _merged(rows: list[list[Action]], parts: list[Segment], placement: Placement) -> list[list[Action]]:
    """The segments' actions on each place by the time at which they start.

    Those of one time wait for none of each other, so any order of them can run: backward first, which lets go of memory, and
    later segments first, which others wait for.
    """
    lowered = with_messages(rows)
    intervals = replay(lowered, lambda action: 1).intervals
    started: list[list[tuple[float, bool, int, Action]]] = [[] for _ in range(placement.places)]
    for index, row in enumerate(lowered):
        for action, interval in zip(row, intervals[index], strict=True):
            if action.op.is_compute:
                forward = action.op is Op.FORWARD
                started[parts[index].place].append((interval.start, forward, -index, action))
    return [[action for *_, action in sorted(row)] for row in started]


def _expand(action: Action, part: Segment, placement: Placement) -> Iterator[Action]:
    """Yield the actions of a segment's stages for one action of the segment."""
    op, _, unit, _ = action
    stages = range(part.first, part.stop)
    for stage in stages if op is Op.FORWARD else reversed(stages):
        if op is Op.FORWARD or placement.goes_backward(stage):
            yield Action(op, stage, unit)
