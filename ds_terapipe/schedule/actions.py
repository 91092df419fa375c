"""Units of work, the actions on them, and their text form.

A *unit* is one token slice of one micro-batch. An *action* is one thing a stage does with a unit. A schedule is a
*grid*: one list of actions per place of the pipeline, executed in order. Actions print as ``2F0.3`` (stage 2 runs slice 3 of
micro-batch 0 forward) or ``1SEND_F0.3`` and parse back. The notation follows torch.distributed.pipelining's, with the
slice added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

_NUMBER = r"(0|[1-9][0-9]*)"


class Op(str, Enum):
    """Operation of a stage on a unit. Forward messages go to the next stage, backward messages to the previous one.

    Where a stage makes weight gradients apart from its backward passes, ``W`` makes them. Slices of a micro-batch go
    backward in descending order: ``W0.2`` makes the remaining ones of slices 2 and later of micro-batch 0. ``W0.0``,
    which always exists, makes the last. One per micro-batch is ``W0.0`` alone. ``W0.2/1of4`` makes those of a `Group`.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT_GRADIENTS = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def is_compute(self) -> bool:
        return self in (Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENTS)

    @property
    def is_send(self) -> bool:
        return self in (Op.SEND_FORWARD, Op.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        return self in (Op.RECV_FORWARD, Op.RECV_BACKWARD)


class Unit(NamedTuple):
    """One token slice of one micro-batch, both counted from 0. Text form: ``0.3``."""

    micro_batch: int
    slice: int

    def __str__(self) -> str:
        return f"{self.micro_batch}.{self.slice}"

    def __repr__(self) -> str:
        return str(self)


class Group(NamedTuple):
    """One of several groups of a stage's layers, in their order, as even as numbers of layers can be.

    Text form behind a weight gradient: ``/1of4``; nothing for all layers.
    """

    number: int
    groups: int

    def __str__(self) -> str:
        return "" if self.groups == 1 else f"/{self.number}of{self.groups}"

    def layers(self, total: int) -> range:
        """The group's layers, by their index in a stage of ``total`` layers."""
        return range(self.number * total // self.groups, (self.number + 1) * total // self.groups)


ALL = Group(0, 1)
"""All layers of a stage."""


class Action(NamedTuple):
    """One thing that one stage does with one unit; weight gradients may be those of a group of its layers.

    Text form: ``2F0.3``, ``1SEND_F0.3``, ``2W0.3/1of4``.
    """

    op: Op
    stage: int
    unit: Unit
    group: Group = ALL

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.unit}{self.group}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def from_text(cls, text: str) -> Action:
        """The exact inverse of ``str(action)``; any other text is a ValueError."""
        match = _ACTION.fullmatch(text)
        if match is None or (match[5] is not None and match[2] != Op.WEIGHT_GRADIENTS):
            ops = ", ".join(Op)
            raise ValueError(f"action: got {text!r}, must be <stage><op><micro-batch>.<slice>, e.g. 2F0.3 (op: {ops})")
        group = ALL if match[5] is None else Group(int(match[5]), int(match[6]))
        return cls(Op(match[2]), int(match[1]), Unit(int(match[3]), int(match[4])), group)

    @property
    def counterpart(self) -> Action | None:
        """The receive that belongs to a send and the send that belongs to a receive, None for a computation.

        The stage at the other end may not exist.
        """
        if self.op.is_compute:
            return None
        peer = self.stage + (1 if self.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD) else -1)
        return Action(_COUNTERPART[self.op], peer, self.unit)


Grid: TypeAlias = Sequence[Sequence[Action]]
"""A schedule: ``grid[place]`` lists the actions of that place's stages in the order in which it executes them."""

_GROUP = rf"(?:/{_NUMBER}of([2-9]|[1-9][0-9]+))?"
_ACTION = re.compile(rf"{_NUMBER}(W|(?:SEND_|RECV_)?[FB]){_NUMBER}\.{_NUMBER}{_GROUP}")
_COUNTERPART = {
    Op.SEND_FORWARD: Op.RECV_FORWARD,
    Op.RECV_FORWARD: Op.SEND_FORWARD,
    Op.SEND_BACKWARD: Op.RECV_BACKWARD,
    Op.RECV_BACKWARD: Op.SEND_BACKWARD,
}
