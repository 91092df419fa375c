"""Channels of messages, and how many of each are on their way.

A channel is one direction of the boundary between two consecutive stages, with a process group of its own. On NCCL the messages
of one group run on one stream in the order in which they were issued, and each holds the ones behind it until its peer has joined
(PyTorch 2.13, unbatched point-to-point operations of a group that is bound to a device). A group with two channels could queue
a send behind a receive that waits for a message which may need that very send.
"""

from __future__ import annotations

from typing import NamedTuple

from .actions import Action, Op

POSTED_AHEAD = 1
"""Receives in each direction that a stage posts before it needs them; two lock up one hardware queue, see hardware_queue.py."""

SENT_KEPT = 8
"""Units whose gradients a stage has sent and the stage before has not taken; at one more it waits."""

EVAL_SENT_KEPT = 4
"""Counterpart of `SENT_KEPT` for outputs that no gradient acknowledges: in an evaluation, and of a forward-only stage.

Other stages keep their outputs anyway in training, for their backward pass."""


class Channel(NamedTuple):
    """One direction of the boundary between stages ``boundary`` and ``boundary + 1``."""

    boundary: int
    forward: bool


def channel_of(message: Action) -> Channel:
    """The channel that carries a message."""
    from_before = message.op in (Op.RECV_FORWARD, Op.SEND_BACKWARD)
    return Channel(message.stage - from_before, message.op in (Op.SEND_FORWARD, Op.RECV_FORWARD))
