"""Costs from recorded training steps: the seconds of each stage for each slice, while all stages work.

A step of the training is cut in some way, runs as any other, and is recorded. So the times are those under load (processes
on one machine slow each other), no sample, random number or buffer is used for them, and nothing has to be run twice. From a
stage's row of events a slice takes the time from the start of its computation to the start of the stage's next computation or
receive: sending it on and the interpreter's own time are in it, waiting is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.cost import MeasuredCost, Sample, StageCost
from ds_terapipe.plan.costs.memory import MemoryModel
from ds_terapipe.plan.stages import LayerSeconds
from ds_terapipe.schedule import Action, Op
from ds_terapipe.tracing.chrome import Event

# Noise only ever adds: a low quantile of the repeats is near what an undisturbed slice takes.
_QUANTILE = 0.25
_LEAST_S = 1e-9


class RecordedStep(NamedTuple):
    """A training step: tokens of the slices of every micro-batch, the events of all ranks, its wall time in seconds."""

    slices: tuple[int, ...]
    events: Sequence[Event]
    seconds: float


class _Timed(NamedTuple):
    """An action of a step with such slices, from ``start`` to ``end``; then its stage was ``free`` for another one."""

    slices: tuple[int, ...]
    action: Action
    start: float
    end: float
    free: float


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
    timed = [_timed(step) for step in steps]
    total = sum(steps[0].slices) if steps else 0
    costs, losses = [], (0.0, 0.0)
    for stage in range(stages):
        weights = _weights(timed, stage) if weights_once else 0.0
        samples = _samples(timed, stage, weights)
        if loss_of_whole and stage == stages - 1:
            samples, losses = _apart(samples, total)
        points = [(1, weights / total), (total, weights)] if weights else []
        costs.append(StageCost(samples, points, f"stage {stage}"))
    curves = [_curve(timed, boundary) for boundary in range(stages - 1)]
    return MeasuredCost(costs, curves, sequences, measured_on, memory, losses, layers)


def overhead(steps: Sequence[RecordedStep]) -> float:
    """Seconds of a step in which no stage runs its schedule: data before it, reductions and the optimiser after it."""
    outside = []
    for step in steps:
        actions = [event for event in step.events if event.action is not None]
        outside.append(step.seconds - (max(e.end for e in actions) - min(e.start for e in actions)))
    return max(_median(outside), 0.0)


def _timed(step: RecordedStep) -> list[_Timed]:
    """The actions of a step, with the time until their stage was free again."""
    by_rank: dict[int, list[tuple[Event, Action]]] = defaultdict(list)
    for event in step.events:
        if event.action is not None:
            by_rank[event.rank].append((event, event.action))
    found = []
    for events in by_rank.values():
        events.sort(key=lambda each: each[0].start)
        free = events[-1][0].end
        for event, action in reversed(events):
            found.append(_Timed(step.slices, action, event.start, event.end, max(free, event.end)))
            if not action.op.is_send:
                free = event.start
    return found


def _samples(steps: Iterable[Sequence[_Timed]], stage: int, weights: float) -> list[Sample]:
    """The seconds of a stage's slices; the backward of an uncut one without its ``weights``."""
    found: dict[tuple[int, int], dict[Op, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in chain.from_iterable(steps):
        op, own, (_, index), _ = each.action
        if own == stage and op in (Op.FORWARD, Op.BACKWARD):
            seconds = each.free - each.start
            if op is Op.BACKWARD and len(each.slices) == 1:
                seconds -= weights
            found[each.slices[index], sum(each.slices[:index])][op].append(max(seconds, _LEAST_S))
    if not found:
        raise ConfigError(f"stage {stage}: got no recorded slice, must have some, measure again")
    return [  # a stage that only goes forward has no backward pass
        Sample(length, context, _typical(times[Op.FORWARD]), _typical(times[Op.BACKWARD] or [_LEAST_S]))
        for (length, context), times in sorted(found.items())
    ]


def _weights(steps: Iterable[Sequence[_Timed]], stage: int) -> float:
    """Seconds of a micro-batch's weight gradients where they are made apart, 0 where they never are."""
    found: list[float] = []
    for step in steps:
        of_step: dict[int, float] = defaultdict(float)
        for each in step:
            if each.action.op is Op.WEIGHT_GRADIENTS and each.action.stage == stage:
                of_step[each.action.unit.micro_batch] += each.free - each.start
        found += of_step.values()
    return _typical(found) if found else 0.0


def _apart(samples: Sequence[Sample], total: int) -> tuple[list[Sample], tuple[float, float]]:
    """Return the samples without the loss of a sequence's last slice, and the loss's seconds."""
    others = [sample for sample in samples if sample.length + sample.context < total]
    if not others:
        return list(samples), (0.0, 0.0)
    longest, deepest = max(s.length for s in others), max(s.context for s in others)
    plain = StageCost(others, what="the last stage without its loss")
    last = [s for s in samples if s.length + s.context == total and s.length <= longest]
    at = [(float(s.length), float(min(s.context, deepest))) for s in last]
    forward = max(_median([s.forward - plain.forward(*point) for s, point in zip(last, at, strict=True)]), 0.0)
    backward = max(_median([s.backward - plain.backward(*point) for s, point in zip(last, at, strict=True)]), 0.0)
    without = [
        s._replace(forward=max(s.forward - forward, _LEAST_S), backward=max(s.backward - backward, _LEAST_S))
        for s in samples
        if s.length + s.context == total
    ]
    return others + without, (forward, backward)


def _curve(steps: Iterable[Sequence[_Timed]], boundary: int) -> list[tuple[float, float]]:
    """Seconds from the moment a slice was handed over to its arrival, where the receiver stood waiting; by tokens."""
    found: dict[int, list[float]] = defaultdict(list)
    lengths: set[int] = set()
    for step in steps:
        sent = {each.action: each for each in step if each.action.op.is_send}
        lengths.update(*(each.slices for each in step))
        for each in step:
            action, sender = each.action, sent.get(each.action.counterpart) if each.action.counterpart else None
            if sender is None or min(action.stage, sender.action.stage) != boundary or each.start > sender.start:
                continue
            found[each.slices[action.unit.slice]].append(max(each.end - sender.end, 0.0))
    points = [(float(length), _typical(times)) for length, times in found.items()]
    ends = [float(min(lengths)), float(max(lengths))]
    if not points:  # no stage ever waited at this boundary: its messages have no visible cost
        return [(end, 0.0) for end in ends]
    # no stage waited for the shortest or the longest: the nearest length stands for them
    nearest = [min(points, key=lambda point: abs(point[0] - end))[1] for end in ends]
    return points + [(end, seconds) for end, seconds in zip(ends, nearest, strict=True) if int(end) not in found]


def _typical(values: Sequence[float]) -> float:
    return float(np.quantile(values, _QUANTILE))


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else 0.0
