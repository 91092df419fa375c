"""From computations to computations and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .actions import Action, Grid, Op


def with_messages(grid: Grid) -> list[list[Action]]:
    """The same computations, with the sends and receives that they need.

    A unit's input (activation, or gradient of its output) is received right before its computation and its result sent
    right after, so each channel, that is one direction between two neighbours, carries units in the order in which both
    ends compute them. Forward and backward traffic are separate channels. Sends are meant to be asynchronous, receives
    to wait.

    Args:
        grid: one list of FORWARD and BACKWARD actions per stage. It is not changed.

    Raises:
        ValueError: the grid holds messages already.
    """
    last = len(grid) - 1
    return [[lowered for action in row for lowered in _around(action, last)] for row in grid]


def _around(action: Action, last: int) -> Iterator[Action]:
    op, stage, unit = action
    if op not in (Op.FORWARD, Op.BACKWARD):
        raise ValueError(
            f"with_messages: got {action}, must be computations only (F and B); the grid was lowered already"
        )
    forward = op is Op.FORWARD
    if stage > 0 if forward else stage < last:
        yield Action(Op.RECV_FORWARD if forward else Op.RECV_BACKWARD, stage, unit)
    yield action
    if stage < last if forward else stage > 0:
        yield Action(Op.SEND_FORWARD if forward else Op.SEND_BACKWARD, stage, unit)


def with_weight_gradients(grid: Grid) -> list[list[Action]]:
    """The same actions, with the weight gradients of a micro-batch after its last backward and what that one sends.

    The stage before gets its gradient first: weight gradients delay nobody (the W of zero-bubble schedules, Qi et al., ICLR
    2024, arXiv 2401.10241, a micro-batch at a time).
    """
    return [list(_then_weights(row)) for row in grid]


def _then_weights(row: Sequence[Action]) -> Iterator[Action]:
    sent = {unit for op, _, unit in row if op is Op.SEND_BACKWARD}
    for action in row:
        op, stage, unit = action
        yield action
        if unit.slice == 0 and op is (Op.SEND_BACKWARD if unit in sent else Op.BACKWARD):
            yield Action(Op.WEIGHT_GRADIENTS, stage, unit)


def has_messages(grid: Grid) -> bool:
    """Whether the grid holds any send or receive."""
    return any(not action.op.is_compute for row in grid for action in row)
