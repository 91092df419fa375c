"""Proves that a grid's messages cannot lock each other up on a device, where a group of ranks runs them one behind the other.

On NCCL the sends and receives of one process group run on one stream in the order in which they were issued, and each holds
the ones behind it until its peer has joined (PyTorch 2.13, unbatched point-to-point operations of a group that is bound to
a device). A grid that `replay` runs with buffered sends can therefore still stop for ever: a send that queues behind a
receive which was posted ahead waits for a message that may need that very send. With a group for every channel, that is one
direction of one boundary, a queue holds sends alone or receives alone, and this replay finds no such circle.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .actions import Action, Grid, Op, Unit
from .placement import Placement, placement_of

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


class _Message(NamedTuple):
    channel: Channel
    unit: Unit
    sends: bool  # this end of it


def stream_deadlock(
    grid: Grid, posted_ahead: int = POSTED_AHEAD, sent_kept: int | None = None, placement: Placement | None = None
) -> dict[int, int]:
    """Return the actions at which places deadlock when their messages run in order of issue, group by group.

    Args:
        grid: computations and messages, as `lower.with_messages` returns them.
        posted_ahead: receives of a channel that are issued before their turn.
        sent_kept: units that may wait to be taken where sends are bounded: gradients, and outputs of a stage that never goes
            backward; a place that has sent more waits for the oldest. None: the engine's numbers.
        placement: of the stages; None: one on each place.

    Returns:
        For each place that does not come to its end, the index of the action at which it waits.
    """
    replay = _StreamReplay(grid, posted_ahead, sent_kept, placement_of(len(grid), placement))
    while replay.places_go_on() or replay.messages_go_through():
        pass
    return {place: at for place, at in enumerate(replay.at) if at < len(grid[place])}


class _StreamReplay:
    """The places' positions and the queues of their groups."""

    def __init__(self, grid: Grid, posted_ahead: int, sent_kept: int | None, placement: Placement) -> None:
        self.at = [0] * len(grid)
        self._grid, self._ahead, self._placement = grid, posted_ahead, placement
        self._kept = {
            Op.SEND_FORWARD: EVAL_SENT_KEPT if sent_kept is None else sent_kept,
            Op.SEND_BACKWARD: SENT_KEPT if sent_kept is None else sent_kept,
        }
        self._answered = {action.stage for row in grid for action in row if action.op is Op.BACKWARD}
        self._queues: dict[tuple[int, Channel], deque[_Message]] = {}
        self._busy: set[tuple[int, Channel]] = set()  # queues that may have a new head
        self._expected: dict[Channel, deque[Unit]] = {}
        self._posted: dict[Channel, deque[Unit]] = {}
        self._through: set[tuple[Channel, Unit]] = set()
        self._untaken: dict[Channel, deque[Unit]] = {}
        self._waits = [False] * len(grid)  # for room, its message being issued
        for place, row in enumerate(grid):
            for action in row:
                if action.op.is_receive:
                    self._expected.setdefault(channel_of(action), deque()).append(action.unit)
            for channel in {channel_of(action) for action in row if action.op.is_receive}:
                self._posted[channel] = deque()
                self._post(place, channel)

    def places_go_on(self) -> bool:
        """Every place as far as it comes; whether any did."""
        before = sum(self.at)
        for place, row in enumerate(self._grid):
            while self.at[place] < len(row) and self._step(place, row[self.at[place]]):
                self.at[place] += 1
        return sum(self.at) > before

    def messages_go_through(self) -> bool:
        """Every message that is at the head of its queue at both ends; whether there was any."""
        any_did = False
        while self._busy:
            place, group = self._busy.pop()
            queue = self._queues[place, group]
            while queue and self._goes_through(place, group, queue):
                any_did = True
        return any_did

    def _goes_through(self, place: int, group: Channel, queue: deque[_Message]) -> bool:
        channel, unit, sends = queue[0]
        ends = [self._placement.place_of(channel.boundary), self._placement.place_of(channel.boundary + 1)]
        peer = sum(ends) - place
        other = self._queues.get((peer, group))
        if not other or other[0] != _Message(channel, unit, not sends):
            return False
        queue.popleft()
        other.popleft()
        self._through.add((channel, unit))
        self._busy.add((peer, group))
        return True

    def _step(self, place: int, action: Action) -> bool:
        """Runs one action; False where it has to wait."""
        if action.op.is_compute:
            return True
        channel, unit = channel_of(action), action.unit
        if action.op.is_receive:
            self._post(place, channel)
            if (channel, unit) not in self._through:
                return False
            self._posted[channel].popleft()
            self._post(place, channel)
            return True
        bounded = action.op is Op.SEND_BACKWARD or action.stage not in self._answered
        untaken = self._untaken.setdefault(channel, deque())
        if not self._waits[place]:
            self._issue(place, _Message(channel, unit, sends=True))
            untaken.append(unit)
        while untaken and (channel, untaken[0]) in self._through:
            untaken.popleft()
        self._waits[place] = bounded and len(untaken) > self._kept[action.op]
        return not self._waits[place]

    def _post(self, place: int, channel: Channel) -> None:
        expected, posted = self._expected[channel], self._posted[channel]
        while expected and len(posted) < self._ahead:
            posted.append(expected.popleft())
            self._issue(place, _Message(channel, posted[-1], sends=False))

    def _issue(self, place: int, message: _Message) -> None:
        key = place, message.channel
        self._queues.setdefault(key, deque()).append(message)
        self._busy.add(key)


def channel_of(action: Action) -> Channel:
    """The channel that carries a message. Raises ValueError for a computation."""
    if action.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD):
        return Channel(action.stage, action.op is Op.SEND_FORWARD)
    if action.op in (Op.RECV_FORWARD, Op.SEND_BACKWARD):
        return Channel(action.stage - 1, action.op is Op.RECV_FORWARD)
    raise ValueError(f"channel_of: got {action}, must be a send or a receive")
