"""Bytes that a step takes on each place of the pipeline, line by line, at the moment when they are most.

The lines follow what the engine keeps:

- ``activations``: of live units, with their inputs and outputs, from a unit's forward to its backward, which lets them go layer
  by layer; a loss's copy of all outputs of a micro-batch that is cut, from its last forward to its last backward, in which
  there are also its gradients;
- ``keys_values``: K and V of a micro-batch that is cut, allocated whole at its first forward, freed after its last backward;
- ``key_value_gradients``: dK and dV (fp32), from its first backward to its last;
- ``weight_gradients``: inputs and output gradients of the linear layers, of a micro-batch's slices from their backward on,
  kept until its weight gradients are made, where those are made once per micro-batch; fp32 sums of 16-bit gradients that are
  made slice by slice, from the first slice's backward to the last one's;
- ``messages``: memory for the next ones, posted ahead; copies of sent activations, where several tensors are packed into one
  message, until the gradient of their unit comes back, or of a later one; the last few gradients sent;
- ``working``: what layers take and give back while a unit is computed, known where a step's peak was measured (`calibrated`); the
  gradient of one weight, which is made before it is added to the others.

A forward-only stage holds a unit's activations only while it computes, K and V until the last slice of a micro-batch went
forward, and the last few activations sent. Stages on one place add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields as dataclass_fields, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ds_terapipe.json_files import Fields
from ds_terapipe.plan.costs.fit import nonnegative_least_squares
from ds_terapipe.schedule import (
    EVAL_SENT_KEPT,
    POSTED_AHEAD,
    SENT_KEPT,
    Action,
    Op,
    Placement,
    Schedule,
    Unit,
    covered_slices,
    order,
    with_weight_gradients,
)

GIGABYTE = 1e9
_SINCE = dict.fromkeys(  # files that were written before have no such lines
    ("working", "joined", "largest_gradient", "packed", "gradient_sums", "losses"), 0.0
)


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage, for all its layers, in bytes per token of a micro-batch (all its sequences together).

    Attributes:
        activations: memory of a live unit, with its inputs and outputs.
        keys_values: K and V, in the model's type.
        key_value_gradients: dK and dV.
        weight_gradients: inputs and output gradients of the linear layers.
        received, sent: messages at the boundary before, and at the one after; 0 at the ends.
        fixed: bytes that are there whatever the plan: weights, gradients, optimiser; 0 where ``memory_gb`` is what is free
            beside them.
        working: temporary memory while a unit is computed, per token of this unit.
        joined: temporary memory that is there whatever the slices, per token of the micro-batch, e.g. ZeRO's buckets.
        largest_gradient: bytes of the largest gradient of a weight.
        packed: sent messages that are copies of several tensors.
        gradient_sums: bytes of the fp32 sums of gradients over the slices of a micro-batch.
        losses: outputs of a cut micro-batch that are joined for its loss.
    """

    activations: float = 0.0
    keys_values: float = 0.0
    key_value_gradients: float = 0.0
    weight_gradients: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    fixed: float = 0.0
    working: float = 0.0
    joined: float = 0.0
    largest_gradient: float = 0.0
    packed: float = 0.0
    gradient_sums: float = 0.0
    losses: float = 0.0


@dataclass(frozen=True)
class MemoryModel:
    """The memory of all stages.

    Attributes:
        stages: one for each stage.
        posted_ahead: messages in each direction for which a stage has memory ready before it needs them.
        sent_kept: sent gradients that a stage holds until they are taken.
    """

    stages: tuple[StageMemory, ...]
    posted_ahead: int = POSTED_AHEAD
    sent_kept: int = SENT_KEPT


class Peaks(NamedTuple):
    """A step that was measured: tokens of the slices of its micro-batches, and the bytes that each place took at once."""

    lengths: tuple[int, ...]
    peaks: tuple[float, ...]


class MemoryUse(NamedTuple):
    """Bytes of one place at its peak, by line; they add up to the peak."""

    fixed: float = 0.0
    activations: float = 0.0
    keys_values: float = 0.0
    key_value_gradients: float = 0.0
    weight_gradients: float = 0.0
    messages: float = 0.0
    working: float = 0.0

    @property
    def total(self) -> float:
        """The peak."""
        return sum(self)


def memory_use(
    model: MemoryModel,
    schedule: str | Schedule,
    lengths: Sequence[int],
    micro_batches: int,
    weights_once: bool = False,
    placement: Placement | None = None,
) -> tuple[MemoryUse, ...]:
    """Peak memory of each place.

    Args:
        model: memory of the tokens.
        schedule: ``terapipe``, ``1f1b``, or anything else that `schedule.order` takes.
        lengths: tokens of each slice; the same for all micro-batches.
        micro_batches: in a step.
        weights_once: weight gradients are made once per micro-batch (where it is cut).
        placement: of the model's stages; None: one on each place.
    """
    where = Placement.plain(len(model.stages)) if placement is None else placement
    apart = None if weights_once and len(lengths) > 1 else ()
    grid = with_weight_gradients(order(schedule, where, [len(lengths)] * micro_batches), where, apart)
    return tuple(_peak(model, where, row, lengths) for row in grid)


def calibrated(
    model: MemoryModel,
    measured: Sequence[Peaks],
    schedule: str,
    micro_batches: int,
    weights_once: bool = False,
    placement: Placement | None = None,
) -> MemoryModel:
    """Calibrate the model to peaks beyond its count: ``working`` and ``joined`` of the stages.

    One step says nothing of how the rest grows with slices; it is then all taken for ``working``, which is the careful guess
    where longer slices come next.

    Args:
        model: without either.
        measured: of one or several steps.
        schedule, micro_batches, weights_once, placement: of all these steps, as in `memory_use`.
    """
    places = [place for place, _, _ in (placement or Placement.plain(len(model.stages))).stages]
    uses = [memory_use(model, schedule, step.lengths, micro_batches, weights_once, placement) for step in measured]
    more = {
        place: _line(
            [float(max(step.lengths)) for step in measured],
            [float(sum(step.lengths)) for step in measured],
            [max(step.peaks[place] - use[place].total, 0.0) for step, use in zip(measured, uses, strict=True)],
        )
        for place in set(places)
    }
    stages = (
        replace(stage, working=more[place][0], joined=more[place][1])
        for stage, place in zip(model.stages, places, strict=True)
    )
    return replace(model, stages=tuple(stages))


def _line(x: Sequence[float], y: Sequence[float], z: Sequence[float]) -> tuple[float, float]:
    """Solve a x + b y = z by least squares, neither below 0; if all x are the same, b is 0."""
    both = np.array([x, y if len(set(x)) > 1 else [0.0] * len(x)]).T
    a, b = nonnegative_least_squares(both, np.array(z))
    return float(a), float(b)


def gigabytes(bytes_: float) -> float:
    """Convert bytes to units of 1e9 bytes, as in ``memory_gb``."""
    return bytes_ / GIGABYTE


def as_dict(use: MemoryUse) -> dict[str, float]:
    """The lines of a stage in bytes, and ``total``."""
    return {**use._asdict(), "total": use.total}


def memory_use_from(fields: Fields) -> MemoryUse:
    """The inverse of `as_dict`. Raises ConfigError, one line with file, field and expectation."""
    return MemoryUse(*(fields.number(line, default=_SINCE.get(line)) for line in MemoryUse._fields))


def model_from(fields: Fields) -> MemoryModel:
    """The inverse of `dataclasses.asdict`. Raises ConfigError, one line with file, field and expectation."""
    names = [each.name for each in dataclass_fields(StageMemory)]
    stages = tuple(
        StageMemory(*(block.number(name, "bytes per token", _SINCE.get(name)) for name in names))
        for block in fields.blocks("stages")
    )
    return MemoryModel(stages, int(fields.number("posted_ahead", "e.g. 2")), int(fields.number("sent_kept", "e.g. 8")))


def _peak(model: MemoryModel, where: Placement, row: Sequence[Action], lengths: Sequence[int]) -> MemoryUse:
    """Walk a place's computations and return the memory use at the peak."""
    row = [action for action in row if action.op.is_compute]
    stages = {stage: _Held(model, where, stage, row, lengths) for stage in sorted({action.stage for action in row})}
    worst = MemoryUse()
    for action in row:
        acting = stages[action.stage]
        use = acting.during(action.op, action.unit)
        if len(stages) > 1:
            use = _together([use, *(other.held() for other in stages.values() if other is not acting)])
        worst = max(worst, use, key=sum)
        acting.after(action)
    return worst


def _together(uses: Sequence[MemoryUse]) -> MemoryUse:
    return MemoryUse(*map(sum, zip(*uses, strict=True)))


class _Held:
    """Memory held by a stage while its place walks along its computations, in tokens of a micro-batch."""

    def __init__(
        self, model: MemoryModel, where: Placement, stage: int, row: Sequence[Action], lengths: Sequence[int]
    ) -> None:
        self._model, self._own, self._lengths = model, model.stages[stage], lengths
        self._tokens = sum(lengths)
        self._whole = self._tokens if len(lengths) > 1 else 0  # nothing is kept from slice to slice where there is one
        counts = [len(lengths)] * (1 + max(unit.micro_batch for _, _, unit, _ in row))
        self._covered = {a: found for a, found in covered_slices(row, counts).items() if a.stage == stage}
        self._apart = bool(self._covered)
        self._live = self._cached = self._returning = self._joined = 0
        self._working = self._sums = self._kept = 0.0
        self._in_hand = 0  # the gradient that a backward starts from is there besides those to come
        forward = [unit for op, own, unit, _ in row if own == stage and op is Op.FORWARD]
        backward = [unit for op, own, unit, _ in row if own == stage and op is Op.BACKWARD]
        self._trained, self._followed = bool(backward), stage + 1 < len(where.stages)
        self._inputs = _Queue(forward, lengths) if where.receives_forward(stage) else _Queue([], lengths)
        self._outputs = _Queue(forward, lengths) if where.sends_forward(stage) else _Queue([], lengths)
        self._gradients = _Queue(backward, lengths) if where.receives_backward(stage) else _Queue([], lengths)
        self._returned = _Queue(backward, lengths) if where.sends_backward(stage) else _Queue([], lengths)

    def during(self, op: Op, unit: Unit) -> MemoryUse:
        """Bytes while a unit is computed."""
        length = self._lengths[unit.slice]
        self._working = (
            0.0 if op is Op.WEIGHT_GRADIENTS else self._own.working * length + self._own.joined * self._tokens
        )
        if op is Op.WEIGHT_GRADIENTS or (op is Op.BACKWARD and not self._apart):
            self._working += self._own.largest_gradient
        if op is Op.FORWARD:
            self._live += length
            self._cached += self._whole if unit.slice == 0 else 0
            self._joined += self._whole if unit.slice == len(self._lengths) - 1 else 0
            self._inputs.go_on()
        elif op is Op.BACKWARD:
            self._gradients.go_on()
            self._outputs.let_go(unit)
            self._in_hand = length if self._followed else 0
            before = self.held()
            # layer after layer lets its activations go, and leaves what is kept of it: most is there at one of the ends
            self._live -= length
            self._returning += self._whole if unit.slice == len(self._lengths) - 1 else 0
            self._kept += length
            self._sums = self._own.gradient_sums if self._whole else 0.0
            return max(before, self.held(), key=sum)
        return self.held()

    def after(self, action: Action) -> None:
        """End an action: it is done, and its results are sent."""
        op, _, unit, group = action
        length, last = self._lengths[unit.slice], unit.slice == len(self._lengths) - 1
        self._working = 0.0
        if op is Op.FORWARD:
            self._outputs.go_on()
            if not self._trained:
                self._live -= length
                self._cached -= self._whole if last else 0
                self._joined = 0
        elif op is Op.BACKWARD:
            self._returned.go_on()
            self._cached -= self._whole if unit.slice == 0 else 0
            self._returning -= self._whole if unit.slice == 0 else 0
            self._joined -= self._whole if unit.slice == 0 else 0
            self._in_hand = 0
            self._sums = 0.0 if unit.slice == 0 else self._sums
        else:
            self._kept -= sum(self._lengths[index] for index in self._covered[action]) / group.groups

    def held(self) -> MemoryUse:
        """Bytes as things are."""
        own, ahead = self._own, self._model.posted_ahead
        sent = self._outputs.sent(None if self._trained else EVAL_SENT_KEPT)
        received = self._inputs.ahead(ahead) + self._returned.sent(self._model.sent_kept)
        return MemoryUse(
            own.fixed,
            own.activations * self._live + own.losses * (self._joined + self._returning),  # and their gradients
            own.keys_values * self._cached,
            own.key_value_gradients * self._returning,
            (own.weight_gradients * self._kept if self._apart else 0.0) + self._sums,
            own.received * received
            + own.sent * (self._gradients.ahead(ahead) + self._in_hand)
            # a unit that is live holds what it sent; where none is kept, the message holds it, packed or not
            + (own.packed if self._trained else own.sent) * sent,
            self._working,
        )


class _Queue:
    """The units that a stage's messages of one kind carry, in their order; their tokens as sums from the first one on."""

    def __init__(self, units: Sequence[Unit], lengths: Sequence[int]) -> None:
        self._index = {unit: index for index, unit in enumerate(units)}
        self._tokens = [0, *accumulate(lengths[unit.slice] for unit in units)]
        self._done = self._gone = 0

    def go_on(self) -> None:
        """One more was taken, or sent."""
        self._done = min(self._done + 1, len(self._tokens) - 1)

    def let_go(self, unit: Unit) -> None:
        """Count a unit and all before it as received by the other stage."""
        self._gone = max(self._gone, self._index.get(unit, -1) + 1)

    def ahead(self, count: int) -> int:
        """Tokens of the next ``count``."""
        return self._tokens[min(self._done + count, len(self._tokens) - 1)] - self._tokens[self._done]

    def sent(self, most: int | None) -> int:
        """Return the tokens of sent units that may not have been received, the last ``most`` at most."""
        first = self._gone if most is None else max(self._gone, self._done - most)
        return self._tokens[self._done] - self._tokens[min(first, self._done)]
