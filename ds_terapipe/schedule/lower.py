"""From computations to computations and messages, and to weight gradients of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest

from .actions import Action, Grid, Group, Op
from .channels import POSTED_AHEAD, Channel, channel_of
from .hardware_queue import queue_deadlock
from .placement import Placement, placement_of
from .replay import replay


def with_messages(
    grid: Grid, placement: Placement | None = None, seconds: Callable[[Action], float] | None = None
) -> list[list[Action]]:
    """Return a grid of computations with the sends and receives that they need.

    A unit's input (activation, or gradient of its output) is received right before its computation and its result sent
    right after, so each channel, that is one direction between two consecutive stages, carries units in the order in which
    both ends compute them. Forward and backward traffic are separate channels. Stages that follow each other on one place
    send each other nothing, and nothing is sent back to a forward-only stage. Sends are meant to be asynchronous, receives to
    wait. Where places have several stages, results may be ready so long before they are needed that their messages lock up one
    hardware queue: then each is sent when the one before it on its channel has been taken.

    Args:
        grid: computations, one list per place. It is not changed.
        placement: of the stages; None: one on each place.
        seconds: of the computations, which say when messages are taken. None: equal lengths, and an order of one stage on
            each place is one that does not lock up.

    Raises:
        ValueError: the grid holds messages already, or is none of the placement.
    """
    where = placement_of(len(grid), placement)
    around = [_messages(where, stage) for stage in range(len(where.stages))]
    lowered = [[made for action in row for made in _around(action, around)] for row in grid]
    may = seconds is not None or not where.is_plain
    locks_up = may and any(queue_deadlock(lowered, ahead) for ahead in (POSTED_AHEAD, 0))
    return _sent_in_time(lowered, where, seconds or (lambda action: 1.0)) if locks_up else lowered


def complete(grid: Grid, placement: Placement | None = None) -> list[list[Action]]:
    """Return a grid with its messages, which an order may have put in already."""
    return [list(row) for row in grid] if has_messages(grid) else with_messages(grid, placement)


def _messages(where: Placement, stage: int) -> dict[Op, tuple[Op | None, Op | None]]:
    """Return the operations before and after each of a stage's computations."""
    return {
        Op.FORWARD: (
            Op.RECV_FORWARD if where.receives_forward(stage) else None,
            Op.SEND_FORWARD if where.sends_forward(stage) else None,
        ),
        Op.BACKWARD: (
            Op.RECV_BACKWARD if where.receives_backward(stage) else None,
            Op.SEND_BACKWARD if where.sends_backward(stage) else None,
        ),
        Op.WEIGHT_GRADIENTS: (None, None),
    }


def _around(action: Action, around: Sequence[dict[Op, tuple[Op | None, Op | None]]]) -> Iterator[Action]:
    op, stage, unit, _ = action
    if not op.is_compute:
        raise ValueError(
            f"with_messages: got {action}, must be computations only (F, B and W); the grid was lowered already"
        )
    before, after = around[stage][op]
    if before is not None:
        yield Action(before, stage, unit)
    yield action
    if after is not None:
        yield Action(after, stage, unit)


def _sent_in_time(grid: list[list[Action]], where: Placement, seconds: Callable[[Action], float]) -> list[list[Action]]:
    """Return a grid with each send at the time at which the message before it is taken, if that is later than its result.

    On one hardware queue a message holds all that is issued after it until it is taken
    (`hardware_queue`), e.g. of units that go around the places in groups of more than there are places. A stage that does not
    go backward sends at once, and waits, since nothing else holds its outputs.
    """
    found = replay(grid, seconds, placement=where)
    if found.stuck:
        return grid
    trained = {action.stage for row in grid for action in row if action.op is Op.BACKWARD}
    taken: dict[Channel, list[float]] = defaultdict(lambda: [0.0])
    for row, intervals in zip(grid, found.intervals, strict=True):
        for action, interval in zip(row, intervals, strict=True):
            if action.op.is_receive:
                taken[channel_of(action)].append(interval.end)
    before = {channel: iter(times) for channel, times in taken.items()}
    rows = []
    for row, intervals in zip(grid, found.intervals, strict=True):
        times = []
        for index, (action, (_, end)) in enumerate(zip(row, intervals, strict=True)):
            least = next(before[channel_of(action)]) if action.op.is_send and action.stage in trained else end
            # of what ends at one time, what was held back is the last: the receives before it let others go on
            times.append((max(end, least), least > end, index))
        rows.append([row[index] for *_, index in sorted(times)])
    return rows


def with_weight_gradients(
    grid: Grid, placement: Placement | None = None, stages: Collection[int] | None = None
) -> list[list[Action]]:
    """Insert weight gradients after a micro-batch's last backward and its send, or keep those that the order has.

    The stage before gets its gradient first, be it on another place or on this one: weight gradients delay no stage
    (the W of zero-bubble schedules, Qi et al., ICLR 2024, arXiv 2401.10241).

    Args:
        grid: computations, with or without messages, one list per place. It is not changed.
        placement: of the stages; None: one on each place.
        stages: stages with separate weight gradients; None: all that go backward. The weight gradients that an order has
            for others are dropped: these stages make theirs in their backward passes.
    """
    where = placement_of(len(grid), placement)
    apart = frozenset(range(len(where.stages)) if stages is None else stages)
    ordered = {stage for row in grid for op, stage, *_ in row if op is Op.WEIGHT_GRADIENTS}
    kept = ([each for each in row if each.op is not Op.WEIGHT_GRADIENTS or each.stage in apart] for row in grid)
    return [list(_then_weights(row, apart - ordered)) for row in kept]


def covered_slices(row: Sequence[Action], slices: Sequence[int]) -> dict[Action, range]:
    """Return the slices whose weight gradients each ``W`` of a place makes: its own and later ones that remain.

    Each group of a stage's layers has slices of its own that remain.

    Args:
        row: actions of a place.
        slices: number of slices of each micro-batch.
    """
    found: dict[Action, range] = {}
    made: dict[tuple[int, int, Group], int] = {}
    for action in row:
        if action.op is Op.WEIGHT_GRADIENTS:
            _, stage, (micro_batch, first), group = action
            found[action] = range(first, made.get((stage, micro_batch, group), slices[micro_batch]))
            made[stage, micro_batch, group] = first
    return found


def _then_weights(row: Sequence[Action], stages: frozenset[int]) -> Iterator[Action]:
    sent = {(stage, unit) for op, stage, unit, _ in row if op is Op.SEND_BACKWARD}
    due: list[Action] = []
    for action, following in zip_longest(row, row[1:]):
        op, stage, unit, _ = action
        yield action
        ends = op is (Op.SEND_BACKWARD if (stage, unit) in sent else Op.BACKWARD)
        if ends and stage in stages and unit.slice == 0:
            due.append(Action(Op.WEIGHT_GRADIENTS, stage, unit))
        # the gradient that this backward left goes on through the stage before
        if ends and following != Action(Op.BACKWARD, stage - 1, unit):
            yield from due
            due.clear()


def has_messages(grid: Grid) -> bool:
    """Whether the grid holds any send or receive."""
    return any(not action.op.is_compute for row in grid for action in row)
