"""Proves that a step cannot lock up where all streams of a device share one hardware queue.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron's tensor parallelism asks for, work is dispatched in the order of
its issue, whatever its stream. An entry is dispatched when its stream's last entry and the events that it waits for have
ended; until then it holds everything issued after it. A message ends when both of its ends are dispatched
(CUDA C++ Programming Guide, "Streams"; CUDA_DEVICE_MAX_CONNECTIONS).

One queue is the hardest case. Whatever an entry waits for on another assignment of the streams to queues, it waits for on
one queue too, and entries never take anything from each other. So a step that comes to its end on one queue does so on
any number of queues: on a stream for each channel, and on a host that waits for each message itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from .actions import Action, Grid, Op, Unit
from .channels import EVAL_SENT_KEPT, POSTED_AHEAD, SENT_KEPT, Channel, channel_of

COMPUTE = "compute"
"""Name of the stream of the computations."""


class Entry(NamedTuple):
    """A piece of work that a host issues.

    Attributes:
        stream: runs its entries one behind the other.
        action: index of the action in its place's row, for reports.
        after: earlier entries of this place whose events it waits for.
        joins: name of the message, which joins two entries; None: it ends as soon as it is dispatched.
    """

    stream: Hashable
    action: int
    after: tuple[int, ...] = ()
    joins: Hashable = None


Program: TypeAlias = Sequence[Entry]


def queue_deadlock(grid: Grid, posted_ahead: int = POSTED_AHEAD) -> dict[int, int]:
    """Return the actions at which places deadlock on one hardware queue each.

    Args:
        grid: computations and messages, as `lower.with_messages` returns them.
        posted_ahead: receives of a channel that are issued before their turn; 0 where shapes are not known yet.

    Returns:
        For each place that does not come to its end, the index of the action at which its queue stands.
    """
    programs = {place: program_of(row, posted_ahead) for place, row in enumerate(grid)}
    at = dispatch(programs)
    return {place: programs[place][index].action for place, index in at.items() if index < len(programs[place])}


def program_of(row: Sequence[Action], posted_ahead: int = POSTED_AHEAD) -> Program:
    """Return the entries that a place's host issues in a step, as ``pipeline/transport/p2p.py`` does."""
    return _Issued(row, posted_ahead).entries


def dispatch(programs: Mapping[int, Program]) -> dict[int, int]:
    """Dispatch all places' entries as far as they go, those of a place in the order of their issue.

    Returns:
        For each place the first entry that is not dispatched, or else that has not ended; the number of entries if all have.
    """
    queues = {place: deque(range(len(program))) for place, program in programs.items()}
    previous: dict[tuple[int, Hashable], int] = {}  # of a stream
    waits: dict[tuple[int, int], tuple[int, ...]] = {}
    for place, program in programs.items():
        for index, entry in enumerate(program):
            last = previous.get((place, entry.stream))
            waits[place, index] = entry.after if last is None else (*entry.after, last)
            previous[place, entry.stream] = index
    ended: dict[int, set[int]] = {place: set() for place in programs}
    joined: dict[Hashable, list[tuple[int, int]]] = {}
    went_on = True
    while went_on:
        went_on = False
        for place, queue in queues.items():
            while queue and ended[place].issuperset(waits[place, queue[0]]):
                index, went_on = queue.popleft(), True
                entry = programs[place][index]
                if entry.joins is None:
                    ended[place].add(index)
                    continue
                there = joined.setdefault(entry.joins, [])
                there.append((place, index))
                if len(there) == 2:
                    for each, number in there:
                        ended[each].add(number)
    pending = {place: sorted({*range(len(program))} - ended[place]) for place, program in programs.items()}
    return {place: (*queue, *pending[place], len(programs[place]))[0] for place, queue in queues.items()}


class _Issued:
    """Entries of a place's host while it walks along its row, as ``pipeline/transport/p2p.py`` issues them."""

    def __init__(self, row: Sequence[Action], posted_ahead: int) -> None:
        self.entries: list[Entry] = []
        self._ahead, self._at = posted_ahead, 0
        self._computed: tuple[int, ...] = ()  # the last entry of the computations
        self._goes_backward = {action.stage for action in row if action.op is Op.BACKWARD}
        self._expected: dict[Channel, deque[Unit]] = {}
        self._posted: dict[Channel, deque[int]] = {}
        self._sent: dict[Channel, deque[tuple[Unit, int]]] = {}
        for action in row:
            if action.op.is_receive:
                self._expected.setdefault(channel_of(action), deque()).append(action.unit)
        for channel in sorted(self._expected, key=lambda channel: (not channel.forward, channel.boundary)):
            self._post(channel)
        for self._at, action in enumerate(row):
            self._act(action)
        self._at = len(row)
        for channel in self._sent:
            self._wait_for_sends(channel, 0)

    def _act(self, action: Action) -> None:
        if action.op.is_compute:
            self._issue(COMPUTE)
        elif action.op.is_receive:
            self._receive(channel_of(action))
            if action.op is Op.RECV_BACKWARD:  # the gradients acknowledge the outputs
                outputs = Channel(action.stage, True)
                units = [unit for unit, _ in self._sent[outputs]]
                if action.unit in units:  # and all that were sent before it
                    self._wait_for_sends(outputs, len(units) - units.index(action.unit) - 1)
        else:
            channel = channel_of(action)
            sent = self._issue(("out", channel), self._computed, (channel, action.unit))
            self._sent.setdefault(channel, deque()).append((action.unit, sent))
            if action.op is Op.SEND_BACKWARD:
                self._wait_for_sends(channel, SENT_KEPT)
            elif action.stage not in self._goes_backward:
                self._wait_for_sends(channel, EVAL_SENT_KEPT)

    def _receive(self, channel: Channel) -> None:
        self._post(channel, max(self._ahead, 1))
        self._issue(COMPUTE, (self._posted[channel].popleft(),))
        self._post(channel)

    def _post(self, channel: Channel, ahead: int | None = None) -> None:
        expected, posted = self._expected[channel], self._posted.setdefault(channel, deque())
        while expected and len(posted) < (self._ahead if ahead is None else ahead):
            posted.append(self._issue(("in", channel), (), (channel, expected.popleft())))

    def _wait_for_sends(self, channel: Channel, kept: int) -> None:
        sent = self._sent[channel]
        while len(sent) > kept:
            self._issue(COMPUTE, (sent.popleft()[1],))

    def _issue(self, stream: Hashable, after: tuple[int, ...] = (), joins: Hashable = None) -> int:
        self.entries.append(Entry(stream, self._at, after, joins))
        index = len(self.entries) - 1
        self._computed = (index,) if stream == COMPUTE else self._computed
        return index
