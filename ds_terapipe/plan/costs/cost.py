"""Time of a slice on a stage: the interface of all cost models, and the model fitted to measurements.

A slice is ``length`` tokens after a context of ``context`` tokens. TeraPipe (arXiv 2102.07988, section 3.3) writes its time as
t(l, 0) + a0 + a1 l + a2 c + a3 l c. Here t(l, 0) is any curve that does not fall, linear between the measured lengths, and
the context's part vanishes at context 0, as it must: t(l, c) = t(l, 0) + a2 c + a3 l c with a2, a3 >= 0. So more tokens or
more context never take less time, whatever the noise.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ds_terapipe.errors import ConfigError, named
from ds_terapipe.json_files import Fields, read_json, write_json
from ds_terapipe.plan.costs.fit import nonnegative_least_squares
from ds_terapipe.plan.costs.memory import MemoryModel, model_from
from ds_terapipe.plan.placed import placement_from
from ds_terapipe.plan.stages import LayerSeconds
from ds_terapipe.schedule import Placement

FORMAT = "ds_terapipe costs 1"
_OVERHEAD, _LIMIT = "overhead_s", "memory_limit_bytes"
Tokens = TypeVar("Tokens", float, NDArray[np.float64])
"""A number of tokens, or an array of them: seconds have its shape."""


class Cost(Protocol):
    """The times of a pipeline's stages, in seconds, for a micro-batch of ``sequences`` sequences.

    Lengths and contexts are tokens of one sequence. Both may be arrays, which broadcast; the answer has their shape.
    """

    @property
    def sequences(self) -> int:
        """Sequences in a micro-batch."""

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that is known about."""

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Forward of one slice."""

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Backward of one slice, without the weight gradients where those are made once per micro-batch."""

    def weights(self, stage: int, length: Tokens) -> Tokens:
        """The weight gradients of a whole sequence of ``length`` tokens; 0 where each backward makes its own."""

    def message(self, boundary: int, length: Tokens) -> Tokens:
        """A slice's activations, or their gradients, from stage ``boundary`` to the next or back."""


class Sample(NamedTuple):
    """One measurement: a slice of ``length`` tokens after ``context`` tokens, in seconds."""

    length: int
    context: int
    forward: float
    backward: float


class Curve:
    """Seconds of slices: the best t(l, 0) that does not fall, linear between the measured lengths, + a2 c + a3 l c.

    Args:
        points: pairs (length, seconds); several of the same length are averaged, in effect.
        what: name of the curve for errors.
        contexts: of the points; none by default.

    Raises:
        ConfigError: no point without context.
    """

    def __init__(
        self, points: Sequence[tuple[float, float]], what: str, contexts: Sequence[float] | None = None
    ) -> None:
        self.points = tuple((int(length), float(seconds)) for length, seconds in points)
        tokens, taken = np.array(points, dtype=float).reshape(-1, 2).T
        before = np.zeros(len(points)) if contexts is None else np.array(contexts, dtype=float)
        if not np.any(before == 0) or np.any(before < 0):
            raise ConfigError(f"{what}: got no measurement without context, must have some, measure again")
        self._what, self._deepest = what, float(np.max(before))
        self._knots, index = np.unique(tokens, return_inverse=True)
        steps = (np.arange(len(self._knots))[None, :] <= index[:, None]).astype(float)
        columns = np.column_stack([steps, before, before * tokens])
        # relative errors: a short slice's microseconds count as much as a long one's milliseconds
        floor = np.maximum(taken, 1e-9)
        fit = nonnegative_least_squares(columns / floor[:, None], taken / floor)
        self._values, (self._by_context, self._by_both) = np.cumsum(fit[:-2]), fit[-2:]

    def __call__(self, length: Tokens, context: Any = 0.0) -> Tokens:
        """Return the seconds of a slice. Raises ConfigError outside the measured range."""
        low, high = float(self._knots[0]), float(self._knots[-1])
        lengths, contexts = np.broadcast_arrays(length, context)
        wrong = (lengths < low) | (lengths > high) | (contexts < 0) | (contexts > self._deepest)
        if np.any(wrong):
            first = int(np.argmax(wrong.ravel()))
            raise ConfigError(
                f"{self._what}: got a slice of {lengths.ravel()[first]:g} tokens after {contexts.ravel()[first]:g}, must be "
                f"within the measured {low:g} to {high:g} tokens after at most {self._deepest:g}, measure again"
            )
        base = np.interp(length, self._knots, self._values)
        return _like(length, base + np.asarray(context) * (self._by_context + self._by_both * np.asarray(length)))


class StageCost:
    """One stage, from measurements.

    Args:
        samples: a few dozen, at context 0 among them.
        weights: pairs (tokens of the whole sequence, seconds) of the weight gradients, where they are made once per
            micro-batch.
        what: name of the stage in errors.

    Raises:
        ConfigError: no sample at context 0.
    """

    def __init__(
        self, samples: Sequence[Sample], weights: Sequence[tuple[float, float]] = (), what: str = "stage"
    ) -> None:
        self.samples, contexts = tuple(samples), [sample.context for sample in samples]
        self.forward = Curve([(s.length, s.forward) for s in samples], what, contexts)
        self.backward = Curve([(s.length, s.backward) for s in samples], what, contexts)
        self.weight_curve = Curve(weights, f"{what}, weight gradients") if weights else None

    def weights(self, length: Tokens) -> Tokens:
        """Seconds of the weight gradients of a whole sequence; 0 where none were measured."""
        return 0.0 * length if self.weight_curve is None else self.weight_curve(length)

    @property
    def max_length(self) -> int:
        """The longest measured sequence: context and slice together."""
        return max(sample.length + sample.context for sample in self.samples)


class MeasuredCost:
    """A `Cost` from measurements.

    Args:
        stage_costs: one per stage; embedding, LM head and loss are in the times of their stages.
        messages: for each boundary pairs (tokens, seconds) of one message.
        sequences: sequences in the micro-batch that was measured.
        measured_on: model, type, device, versions, ...: measurements are used again only where this is the same. Two figures
            of the run are beside them, ``overhead_s`` and ``memory_limit_bytes``. ``placement``, where it is there, says where
            the stages were.
        memory: memory of such a micro-batch's tokens on each stage, if measured.
        loss: forward and backward seconds of a loss that is made of a whole sequence's outputs, with its last slice on the
            last stage; zero where the loss is in the times of the slices.
        layers: times of single layers, if measured.
    """

    def __init__(
        self,
        stage_costs: Sequence[StageCost],
        messages: Sequence[Sequence[tuple[float, float]]],
        sequences: int = 1,
        measured_on: Mapping[str, Any] | None = None,
        memory: MemoryModel | None = None,
        loss: tuple[float, float] = (0.0, 0.0),
        layers: LayerSeconds | None = None,
    ) -> None:
        self.stage_costs = tuple(stage_costs)
        self.sequences, self.memory, self.loss, self.layers = sequences, memory, loss, layers
        self.measured_on = dict(measured_on or {})
        self._messages = [Curve(points, f"messages of boundary {index}") for index, points in enumerate(messages)]
        self._ends = self.max_length  # tokens of a sequence, with the last of which comes the loss

    def of_length(self, length: int) -> MeasuredCost:
        """Return the costs of slices of sequences of ``length`` tokens, whose loss takes a share by tokens."""
        costs, (forward, backward) = copy.copy(self), self.loss
        costs._ends, share = length, length / self._ends
        costs.loss = forward * share, backward * share
        return costs

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_costs)

    @property
    def overhead_s(self) -> float:
        """Seconds of a step outside of its schedule, 0 where that was not measured."""
        return float(self.measured_on.get(_OVERHEAD) or 0.0)

    @property
    def memory_limit(self) -> float | None:
        """Bytes that were free for activations and buffers on every stage's device, None where nothing limits them."""
        limit = self.measured_on.get(_LIMIT)
        return None if limit is None else float(limit)

    @property
    def placement(self) -> Placement:
        """Placement of the measured stages."""
        return placement_from(Fields(self.measured_on, "costs: measured_on"), self.stages)

    @property
    def holds_for(self) -> dict[str, Any]:
        """Return ``measured_on`` without the measured values: a run with equal facts may use these costs."""
        return {name: value for name, value in self.measured_on.items() if name not in (_OVERHEAD, _LIMIT)}

    @property
    def min_length(self) -> int:
        """The shortest slice that was measured on every stage."""
        return _known_slices(self.stage_costs)[0]

    @property
    def max_slice(self) -> int:
        """The longest slice that was measured on every stage."""
        return _known_slices(self.stage_costs)[1]

    @property
    def max_length(self) -> int:
        """The longest sequence that was measured on every stage."""
        return min(stage.max_length for stage in self.stage_costs)

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """See `Cost`; raises ConfigError outside the measured range."""
        return self._with_loss(stage, length, context, self.stage_costs[stage].forward(length, context), self.loss[0])

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """See `Cost`; raises ConfigError outside the measured range."""
        return self._with_loss(stage, length, context, self.stage_costs[stage].backward(length, context), self.loss[1])

    def _with_loss(self, stage: int, length: Tokens, context: Tokens, seconds: Tokens, loss: float) -> Tokens:
        """``seconds``, and the loss for the slice that ends a sequence on the last stage."""
        if stage < self.stages - 1 or not loss:
            return seconds
        ends = np.asarray(length) + np.asarray(context) >= self._ends
        return _like(length, np.asarray(seconds) + np.where(ends, loss, 0.0))

    def weights(self, stage: int, length: Tokens) -> Tokens:
        """See `Cost`; raises ConfigError outside the measured range."""
        return self.stage_costs[stage].weights(length)

    def message(self, boundary: int, length: Tokens) -> Tokens:
        """See `Cost`; raises ConfigError outside the measured range."""
        return self._messages[boundary](length)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements as `save` writes them; the fit is made again from them."""
        return {
            "format": FORMAT,
            "measured_on": self.measured_on,
            "sequences": self.sequences,
            "stages": [
                {
                    "samples": [list(sample) for sample in stage.samples],
                    "weights": [list(point) for point in stage.weight_curve.points] if stage.weight_curve else [],
                }
                for stage in self.stage_costs
            ],
            "messages": [{"points": [list(point) for point in curve.points]} for curve in self._messages],
            "loss": [list(self.loss)],
            "memory": None if self.memory is None else asdict(self.memory),
            "layers": None if self.layers is None else asdict(self.layers),
        }

    def save(self, path: str | Path) -> None:
        """Write the measurements. Raises ConfigError when the file cannot be written."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> MeasuredCost:
        """Read a file of `save`. Raises ConfigError, one line with file, field and expectation."""
        fields = read_json(path, "a measurement", FORMAT)
        stages = [_stage(block, index) for index, block in enumerate(fields.blocks("stages"))]
        messages = _boundaries(fields, stages)
        memory = None
        if fields.value("memory") is not None:
            memory = model_from(Fields(fields.block("memory"), fields.path("memory")))
            if len(memory.stages) != len(stages):
                raise fields.fail("memory", f"of {len(stages)} stages", "a new measurement")
        ((forward, backward),) = fields.rows("loss", ("forward", "backward")) if fields.value("loss") else ((0.0, 0.0),)
        loss = forward, backward
        about = Fields(fields.block("measured_on"), fields.path("measured_on"))
        placement, layers = placement_from(about, len(stages)), None
        if fields.value("layers") is not None:
            layers = LayerSeconds.from_fields(Fields(fields.block("layers"), fields.path("layers")), placement.places)
        about.number(_OVERHEAD, "e.g. 0", default=0.0)
        if about.value(_LIMIT) is not None:
            about.number(_LIMIT, "null for no limit")
        return cls(stages, messages, fields.count("sequences"), fields.block("measured_on"), memory, loss, layers)


def _stage(block: Fields, index: int) -> StageCost:
    rows = block.rows("samples", Sample._fields)
    for number, row in enumerate(rows):
        if row[0] < 1 or row[0] != int(row[0]) or row[1] != int(row[1]) or not (row[2] > 0 and row[3] > 0):
            raise ConfigError(
                f"{block.path('samples')}[{number}]: got {list(row)}, must be whole numbers of tokens, at least one, and "
                "positive seconds, use a new measurement"
            )
    samples = [Sample(int(row[0]), int(row[1]), row[2], row[3]) for row in rows]
    weights = [(row[0], row[1]) for row in block.rows("weights", ("tokens", "seconds"), least=0)]
    longest = max(sample.length + sample.context for sample in samples)
    if weights and (max(tokens for tokens, _ in weights) < longest or min(tokens for tokens, _ in weights) < 1):
        raise block.fail("weights", f"of at least one token and up to {longest}", "a new measurement")
    with named(block.path("samples")):
        return StageCost(samples, weights, f"costs of stage {index}")


def _known_slices(stages: Sequence[StageCost]) -> tuple[int, int]:
    """Tokens of the shortest and of the longest slice that was measured on every stage."""
    lengths = [[sample.length for sample in stage.samples] for stage in stages]
    return max(map(min, lengths)), min(map(max, lengths))


def _boundaries(fields: Fields, stages: Sequence[StageCost]) -> list[list[tuple[float, float]]]:
    """The messages of a file: a curve between each two stages that knows all the slices that the stages know."""
    blocks = fields.blocks("messages", least=len(stages) - 1)
    if len(blocks) != len(stages) - 1:
        raise fields.fail("messages", f"{len(stages) - 1} boundaries of {len(stages)} stages", "a new measurement")
    least, most = _known_slices(stages)
    found = []
    for block in blocks:
        points = [(row[0], row[1]) for row in block.rows("points", ("tokens", "seconds"))]
        tokens = [point[0] for point in points]
        if min(tokens) < 1 or min(tokens) > least or max(tokens) < most:
            raise block.fail("points", f"of at least one token and from {least} to {most}", "a new measurement")
        found.append(points)
    return found


def _like(tokens: Tokens, values: Any) -> Tokens:
    return cast(Tokens, np.asarray(values, dtype=float) if np.ndim(values) else float(values))
