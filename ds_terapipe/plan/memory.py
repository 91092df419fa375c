"""Bytes that a step takes on each stage, line by line, at the moment when they are most.

The lines follow what the engine keeps:

- ``activations``: of live units, from a unit's forward to its backward;
- ``keys_values``: K and V of a micro-batch that is cut, allocated whole at its first forward, freed after its last backward;
- ``key_value_gradients``: dK and dV (fp32), from its first backward to its last;
- ``weight_gradients``: inputs and output gradients of the linear layers, of a micro-batch's slices from their backward on,
  kept until its weight gradients are made, where those are made once per micro-batch;
- ``messages``: memory for the next ones, posted ahead; sent activations until the gradient of their unit comes back, or of a
  later one; the last few gradients sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, NamedTuple

from ds_terapipe.errors import ConfigError
from ds_terapipe.schedule import POSTED_AHEAD, SENT_KEPT, Action, Op, Unit, order

from .files import Fields

GIGABYTE = 1e9


@dataclass(frozen=True)
class StageMemory:
    """What a stage takes, in bytes per token of a micro-batch (all its sequences together), for all its layers.

    Attributes:
        activations: what a live unit holds.
        keys_values: K and V, in the model's type.
        key_value_gradients: dK and dV.
        weight_gradients: inputs and output gradients of the linear layers.
        received, sent: what the boundary before hands over, and the boundary after; 0 at the ends.
        fixed: bytes that are there whatever the plan: weights, gradients, optimiser; where ``memory_gb`` is what is free only
            packed weights.
    """

    activations: float = 0.0
    keys_values: float = 0.0
    key_value_gradients: float = 0.0
    weight_gradients: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    fixed: float = 0.0


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


class MemoryUse(NamedTuple):
    """Bytes of one stage at its peak, by line; they add up to the peak."""

    fixed: float = 0.0
    activations: float = 0.0
    keys_values: float = 0.0
    key_value_gradients: float = 0.0
    weight_gradients: float = 0.0
    messages: float = 0.0

    @property
    def total(self) -> float:
        """The peak."""
        return sum(self)


def memory_use(
    model: MemoryModel, schedule: str, lengths: Sequence[int], micro_batches: int, weights_once: bool = False
) -> tuple[MemoryUse, ...]:
    """Peak memory of each stage.

    Args:
        model: what tokens take.
        schedule: ``terapipe`` or ``1f1b``.
        lengths: tokens of each slice; the same for all micro-batches.
        micro_batches: in a step.
        weights_once: weight gradients are made once per micro-batch (where it is cut).
    """
    rows = order(schedule, len(model.stages), [len(lengths)] * micro_batches)
    return tuple(_peak(model, stage, row, lengths, weights_once) for stage, row in enumerate(rows))


def check_stages(model: MemoryModel, stages: int) -> None:
    """Raises ConfigError when the model is not one of so many stages."""
    if len(model.stages) != stages:
        raise ConfigError(
            f"memory: got {len(model.stages)} stages, must be the pipeline's {stages}, use the memory of each stage"
        )


def gigabytes(bytes_: float) -> float:
    """In units of 1e9 bytes, as ``memory_gb`` counts them."""
    return bytes_ / GIGABYTE


def as_dict(use: MemoryUse) -> dict[str, float]:
    """The lines of a stage in bytes, and ``total``."""
    return {**use._asdict(), "total": use.total}


def model_dict(model: MemoryModel) -> dict[str, Any]:
    """The model as a file holds it."""
    return {
        "stages": [asdict(stage) for stage in model.stages],
        "posted_ahead": model.posted_ahead,
        "sent_kept": model.sent_kept,
    }


def model_from(fields: Fields) -> MemoryModel:
    """The inverse of `model_dict`. Raises ConfigError, one line with file, field and expectation."""
    names = [each.name for each in dataclass_fields(StageMemory)]
    stages = tuple(
        StageMemory(*(block.number(name, "bytes per token") for name in names)) for block in fields.blocks("stages")
    )
    return MemoryModel(stages, int(fields.number("posted_ahead", "e.g. 2")), int(fields.number("sent_kept", "e.g. 8")))


def _peak(
    model: MemoryModel, stage: int, row: Sequence[Action], lengths: Sequence[int], weights_once: bool
) -> MemoryUse:
    """Walks a stage's computations and keeps what is held at the worst moment."""
    own, total, cut = model.stages[stage], sum(lengths), len(lengths) > 1
    messages = _Messages(model, own, row, lengths)
    live = cached = returning = kept = 0
    worst = MemoryUse(own.fixed)
    for op, _, unit in row:
        length = lengths[unit.slice]
        if op is Op.FORWARD:
            live += length
            cached += total if cut and unit.slice == 0 else 0
        else:
            returning += total if cut and unit.slice == len(lengths) - 1 else 0
            kept += length if cut and weights_once else 0
        use = MemoryUse(
            own.fixed,
            own.activations * live,
            own.keys_values * cached,
            own.key_value_gradients * returning,
            own.weight_gradients * kept,
            messages.held(op, unit),
        )
        worst = max(worst, use, key=lambda each: each.total)
        if op is Op.BACKWARD:
            live -= length
            if cut and unit.slice == 0:
                cached -= total
                returning -= total
                kept = 0
    return worst


class _Messages:
    """What a stage holds of messages while it walks along its computations."""

    def __init__(self, model: MemoryModel, own: StageMemory, row: Sequence[Action], lengths: Sequence[int]) -> None:
        self._model, self._own, self._lengths = model, own, lengths
        self._units = {op: [a.unit for a in row if a.op is op] for op in (Op.FORWARD, Op.BACKWARD)}
        self._place = {unit: index for index, unit in enumerate(self._units[Op.FORWARD])}
        self._done = {Op.FORWARD: 0, Op.BACKWARD: 0}
        self._let_go = 0  # activations sent before this place in the order are with the next stage for certain

    def held(self, op: Op, unit: Unit) -> float:
        """Bytes while ``unit`` is computed."""
        self._done[op] += 1
        if op is Op.BACKWARD:
            self._let_go = max(self._let_go, self._place[unit] + 1)
        forwards, backwards = self._done[Op.FORWARD], self._done[Op.BACKWARD]
        out = self._units[Op.FORWARD][self._let_go : forwards - (op is Op.FORWARD)]
        back = self._units[Op.BACKWARD][: backwards - (op is Op.BACKWARD)]
        back = back[max(len(back) - self._model.sent_kept, 0) :]
        # the gradient that a backward starts from is in hand besides those to come
        gradients = self._ahead(Op.BACKWARD) + ([unit] if op is Op.BACKWARD else [])
        return self._own.received * self._tokens(self._ahead(Op.FORWARD) + back) + self._own.sent * self._tokens(
            gradients + out
        )

    def _ahead(self, op: Op) -> list[Unit]:
        done = self._done[op]
        return self._units[op][done : done + self._model.posted_ahead]

    def _tokens(self, units: Sequence[Unit]) -> int:
        return sum(self._lengths[unit.slice] for unit in units)
