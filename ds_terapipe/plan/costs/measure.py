"""Costs from recorded training steps: the seconds of each stage for each slice, while all stages work.

A step of the training is cut in some way, runs as any other, and is recorded. So the times are those under load (processes
on one machine slow each other), no sample, random number or buffer is used for them, and nothing has to be run twice. From a
stage's row of events a slice takes the time from the start of its computation to the start of the stage's next computation or
receive: sending it on and the interpreter's own time are in it, waiting is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.cost import MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.layers import LayerSeconds
from ds_terapipe.plan.costs.memory import MemoryModel
from ds_terapipe.schedule import Action, Op
from ds_terapipe.tracing.chrome import Event

# Noise only ever adds: a low quantile of the repeats is near what an undisturbed slice takes.
_QUANTILE = 0.25
_Samples = dict[tuple[int, int], dict[Op, list[float]]]
_LEAST_S = 1e-9


class RecordedStep(NamedTuple):
    """A training step: tokens of the slices of every micro-batch, the events of all ranks, its wall time in seconds."""

    slices: tuple[int, ...]
    events: Sequence[Event]
    seconds: float


class _Timed(NamedTuple):
    action: Action
    start: float
    end: float  # when the stage was free for its next computation or receive
    sent: float  # when the action itself was over


def measured_cost(
    steps: Sequence[RecordedStep],
    stages: int,
    sequences: int,
    weights_once: bool,
    loss_of_whole: bool,
    measured_on: Mapping[str, Any],
    memory: MemoryModel | None = None,
    layers: LayerSeconds | None = None,
) -> MeasuredCost:
    """The costs that the steps show.

    Args:
        steps: recorded steps of sequences of one length, cut in different ways, uncut among them if that was possible.
        stages: pipeline stages.
        sequences: in a micro-batch.
        weights_once: weight gradients are made once per micro-batch where it is cut; the backward of an uncut one has them.
        loss_of_whole: the loss is made of a micro-batch's whole outputs, with its last slice.
        measured_on, memory, layers: kept with the costs.

    Raises:
        ConfigError: no step, or a stage without events.
    """
    rows = [row for step in steps for row in _rows(step)]
    messages = [message for step in steps for message in _messages(step)]
    ahead = {stage: _receive_overhead(messages, stage) for stage in range(stages)}
    total = sum(steps[0].slices) if steps else 0
    weights = [_weights(rows, stage) for stage in range(stages)]
    costs = []
    losses = (0.0, 0.0)
    for stage in range(stages):
        samples = _samples(rows, stage, ahead[stage], weights[stage] if weights_once else 0.0)
        if loss_of_whole and stage == stages - 1:
            samples, losses = _apart(samples, total)
        points = [(1, weights[stage] / total), (total, weights[stage])] if weights_once and weights[stage] else []
        costs.append(StageCost(samples, points, f"stage {stage}"))
    lengths = [length for step in steps for length in step.slices]
    curves = [_curve(messages, boundary, ahead, lengths) for boundary in range(stages - 1)]
    return MeasuredCost(costs, curves, sequences, measured_on, memory, losses, layers)


def overhead(steps: Sequence[RecordedStep]) -> float:
    """Seconds of a step in which no stage runs its schedule: data before it, reductions and the optimiser after it."""
    outside = []
    for step in steps:
        actions = [event for event in step.events if event.action is not None]
        outside.append(step.seconds - (max(e.end for e in actions) - min(e.start for e in actions)))
    return max(_median(outside), 0.0)


class _Message(NamedTuple):
    """A message: the receive's action, its tokens, and its timings at sender and receiver."""

    receive: Action
    length: int
    sent: _Timed
    received: _Timed


class _Row(NamedTuple):
    slices: tuple[int, ...]
    events: list[_Timed]


def _rows(step: RecordedStep) -> list[_Row]:
    """The actions of each rank in order, with the time until the stage was free again."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in step.events:
        by_rank[event.rank].append(event)
    rows = []
    for events in by_rank.values():
        acted = [(event, event.action) for event in events if event.action is not None]
        ordered = sorted(acted, key=lambda each: each[0].start)
        timed: list[_Timed] = []
        free = ordered[-1][0].end if ordered else 0.0
        for event, action in reversed(ordered):
            timed.append(_Timed(action, event.start, max(free, event.end), event.end))
            if not action.op.is_send:
                free = event.start
        if timed:
            rows.append(_Row(step.slices, timed[::-1]))
    return rows


def _messages(step: RecordedStep) -> list[_Message]:
    """The messages of a step, as both ends saw them."""
    rows = _rows(step)
    sent = {timed.action: timed for row in rows for timed in row.events if timed.action.op.is_send}
    found = []
    for row in rows:
        for timed in (t for t in row.events if t.action.op.is_receive):
            sender = sent.get(timed.action.counterpart) if timed.action.counterpart else None
            if sender is not None:
                found.append(_Message(timed.action, step.slices[timed.action.unit.slice], sender, timed))
    return found


def _receive_overhead(messages: Sequence[_Message], stage: int) -> dict[Op, float]:
    """Return a stage's seconds of a receive whose message has arrived already: the shortest of the late receives.

    A receive is late if it starts later than the message could travel: the longest time of a message to a waiting
    receiver.
    """
    shortest: dict[Op, float] = {}
    own = [message for message in messages if message.receive.stage == stage]
    for op, receive in ((Op.FORWARD, Op.RECV_FORWARD), (Op.BACKWARD, Op.RECV_BACKWARD)):
        same = [message for message in own if message.receive.op is receive]
        travelled = max((m.received.sent - m.sent.sent for m in same if m.received.start <= m.sent.start), default=0.0)
        late = [m.received.sent - m.received.start for m in same if m.received.start >= m.sent.sent + travelled]
        shortest[op] = min(late, default=0.0)
    return shortest


def _samples(rows: Iterable[_Row], stage: int, ahead: Mapping[Op, float], weights: float) -> list[Sample]:
    found: _Samples = defaultdict(lambda: defaultdict(list))
    for row in rows:
        starts = [0, *accumulate(row.slices)]
        for timed in row.events:
            op, own, (_, index) = timed.action
            if own != stage or op not in (Op.FORWARD, Op.BACKWARD):
                continue
            seconds = timed.end - timed.start + ahead[op]
            if op is Op.BACKWARD and len(row.slices) == 1:
                seconds -= weights
            found[row.slices[index], starts[index]][op].append(max(seconds, _LEAST_S))
    if not found:
        raise ConfigError(f"stage {stage}: got no recorded slice, must have some, measure again")
    return [  # a stage that only goes forward has no backward pass
        Sample(length, context, _typical(times[Op.FORWARD]), _typical(times[Op.BACKWARD] or [_LEAST_S]))
        for (length, context), times in sorted(found.items())
    ]


def _weights(rows: Iterable[_Row], stage: int) -> float:
    """Seconds of a micro-batch's weight gradients where they are made apart, 0 where they never are."""
    found: list[float] = []
    for row in rows:
        of_row: dict[int, float] = defaultdict(float)
        for timed in row.events:
            if timed.action.op is Op.WEIGHT_GRADIENTS and timed.action.stage == stage:
                of_row[timed.action.unit.micro_batch] += timed.end - timed.start
        found += of_row.values()
    return _typical(found) if found else 0.0


def _apart(samples: Sequence[Sample], total: int) -> tuple[list[Sample], tuple[float, float]]:
    """Return the samples without the loss of a sequence's last slice, and the loss's seconds."""
    others = [sample for sample in samples if sample.length + sample.context < total]
    if not others:
        return list(samples), (0.0, 0.0)
    longest = max(sample.length for sample in others)
    deepest = max(sample.context for sample in others)
    plain = StageCost(others, what="the last stage without its loss")
    last = [s for s in samples if s.length + s.context == total and s.length <= longest]
    extra = [
        (
            s.forward - plain.forward(float(s.length), float(min(s.context, deepest))),
            s.backward - plain.backward(float(s.length), float(min(s.context, deepest))),
        )
        for s in last
    ]
    loss = (max(_median([e[0] for e in extra]), 0.0), max(_median([e[1] for e in extra]), 0.0))
    return [
        s
        if s.length + s.context < total
        else s._replace(forward=max(s.forward - loss[0], _LEAST_S), backward=max(s.backward - loss[1], _LEAST_S))
        for s in samples
    ], loss


def _curve(
    messages: Iterable[_Message], boundary: int, ahead: Mapping[int, Mapping[Op, float]], lengths: Sequence[int]
) -> list[tuple[float, float]]:
    """Seconds from the moment a slice was handed over to its arrival, where the receiver stood waiting; by tokens."""
    found: dict[int, list[float]] = defaultdict(list)
    for receive, length, sent, received in messages:
        peer = receive.peer
        assert peer is not None
        if min(receive.stage, peer) == boundary and received.start <= sent.start:
            op = Op.FORWARD if receive.op is Op.RECV_FORWARD else Op.BACKWARD
            found[length].append(max(received.sent - sent.sent - ahead[receive.stage][op], 0.0))
    points = [(float(length), _typical(times)) for length, times in found.items()]
    ends = [float(min(lengths)), float(max(lengths))]
    if not points:  # no stage ever waited at this boundary: its messages have no visible cost
        return [(end, 0.0) for end in ends]
    # no stage waited for the shortest or the longest: the nearest length stands for them
    nearest = [min(points, key=lambda point: abs(point[0] - end))[1] for end in ends]
    known = {point[0] for point in points}
    return points + [(end, seconds) for end, seconds in zip(ends, nearest, strict=True) if end not in known]


def _typical(values: Sequence[float]) -> float:
    return float(np.quantile(values, _QUANTILE))


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0
