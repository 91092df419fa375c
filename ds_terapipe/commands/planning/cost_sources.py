"""Sources of the seconds of ``plan`` and ``simulate``: a model on a cluster, measurements, or units without a cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.plan.costs.analytic import AnalyticCost
from ds_terapipe.plan.costs.analytic_memory import analytic_memory, fixed_bytes
from ds_terapipe.plan.costs.cost import Cost, MeasuredCost, Tokens
from ds_terapipe.plan.costs.hardware import Cluster, Model
from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryModel


class Source(Protocol):
    """Costs of a pipeline for any size of micro-batch that they are known for."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""

    @property
    def text(self) -> str:
        """Description of the source of the costs."""

    @property
    def about(self) -> Mapping[str, Any]:
        """The same for a plan's file."""

    @property
    def overhead_s(self) -> float:
        """Seconds of a step after its last action."""

    @property
    def device_gb(self) -> float | None:
        """Memory of a device in 1e9 bytes; None if it is not known."""

    def cost(self, sequences: int) -> Cost:
        """Return the cost of micro-batches of so many sequences."""

    def memory(self, sequences: int) -> MemoryModel | None:
        """Return the memory model of micro-batches of so many sequences; None if it is not known."""

    def chunked(self, sequences: int, chunks: int) -> Cost:
        """Stages are the virtual stages of an interleaved schedule. Raises ConfigError where there are none."""


@dataclasses.dataclass(frozen=True)
class UnitCost:
    """A `Cost` without any: forward of a whole sequence takes 1 on each stage, backward 2, messages nothing."""

    total: int
    sequences: int = 1
    weights_once: bool = False
    chunks: int = 1

    @property
    def max_length(self) -> int:
        return self.total

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Return the forward time: the share of the sequence's tokens."""
        return length * (self.sequences / self.total / self.chunks)

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Twice the forward, or as long where weight gradients are made apart."""
        return length * ((1 if self.weights_once else 2) * self.sequences / self.total / self.chunks)

    def weights(self, stage: int, length: Tokens) -> Tokens:
        """Return the time of separate weight gradients, that of a forward; 0 if they are not separate."""
        return length * (self.weights_once * self.sequences / self.total / self.chunks)

    def message(self, boundary: int, length: Tokens) -> Tokens:
        """No time."""
        return 0.0 * length


@dataclasses.dataclass(frozen=True)
class Units:
    """No cost was given: schedules can be drawn and compared all the same."""

    stages: int
    total: int
    weights_once: bool = False
    text: str = "unit costs: forward of a sequence 1, backward 2 on each stage, slices by their tokens, messages free"
    overhead_s: float = 0.0
    device_gb: float | None = None

    @property
    def about(self) -> Mapping[str, Any]:
        """See `Source`."""
        return {"costs": "units"}

    def cost(self, sequences: int) -> UnitCost:
        """See `Source`."""
        return UnitCost(self.total, sequences, self.weights_once)

    def memory(self, sequences: int) -> None:
        """Not known."""

    def chunked(self, sequences: int, chunks: int) -> UnitCost:
        """See `Source`."""
        return dataclasses.replace(self.cost(sequences), chunks=chunks)


@dataclasses.dataclass(frozen=True)
class Analytic:
    """A model on a cluster, from operations and bytes."""

    model: Model
    cluster: Cluster
    layers: tuple[int, ...]
    tensor_parallel: int = 1
    data_parallel: int = 1
    shares_optimizer: bool = False  # among the replicas: ZeRO
    weights_once: bool = True
    fixed: bool = True  # whether the memory counts weights, gradients and optimiser

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def text(self) -> str:
        """See `Source`."""
        devices = self.stages * self.tensor_parallel * self.data_parallel
        return (
            f"{self.model.name} on {self.cluster.name}, estimated from datasheets: {self.stages} stages x "
            f"{self.tensor_parallel} tensor-parallel x {self.data_parallel} data-parallel = {devices} devices"
        )

    @property
    def about(self) -> Mapping[str, Any]:
        """See `Source`."""
        return {
            "costs": "analytic",
            "model": self.model.name,
            "cluster": self.cluster.name,
            "stage_layers": list(self.layers),
            "tensor_parallel": self.tensor_parallel,
            "data_parallel": self.data_parallel,
            "rates": dataclasses.asdict(self.cluster.rates),
        }

    @property
    def overhead_s(self) -> float:
        """See `Source`."""
        return self.cost(1).step_overhead(self.data_parallel)

    @property
    def device_gb(self) -> float:
        """See `Source`."""
        return self.cluster.memory_gb

    def cost(self, sequences: int) -> AnalyticCost:
        """See `Source`."""
        return self._cost(sequences, self.layers)

    def memory(self, sequences: int) -> MemoryModel:
        """See `Source`."""
        found = analytic_memory(self.model, self.layers, self.tensor_parallel, sequences, self.weights_once)
        if not self.fixed:
            return found
        shards = self.data_parallel if self.shares_optimizer else 1
        bytes_ = fixed_bytes(self.model, self.layers, self.tensor_parallel, shards)
        stages = (dataclasses.replace(stage, fixed=each) for stage, each in zip(found.stages, bytes_, strict=True))
        return dataclasses.replace(found, stages=tuple(stages))

    def chunked(self, sequences: int, chunks: int) -> AnalyticCost:
        """See `Source`."""
        if any(count % chunks for count in self.layers):
            layers = ",".join(map(str, self.layers))
            raise bad_value("chunks", chunks, f"a divisor of every stage's layers ({layers})", "another number")
        return self._cost(sequences, tuple(count // chunks for _ in range(chunks) for count in self.layers))

    def with_layout(self, layers: tuple[int, ...], tensor_parallel: int | None = None) -> Analytic:
        """The same model, divided in another way."""
        return dataclasses.replace(self, layers=layers, tensor_parallel=tensor_parallel or self.tensor_parallel)

    def layer_seconds(self, sequences: int, lengths: tuple[int, ...]) -> list[float]:
        """Forward and backward of each layer over a micro-batch in these slices; embedding and head with their neighbours."""
        each = self._cost(sequences, (1,) * self.model.num_layers)
        length = np.array(lengths, dtype=float)
        context = np.cumsum(length) - length
        return [
            float(np.sum(each.forward(n, length, context) + each.backward(n, length, context)))
            + float(each.weights(n, float(sum(lengths))))
            for n in range(self.model.num_layers)
        ]

    def _cost(self, sequences: int, layers: tuple[int, ...]) -> AnalyticCost:
        return AnalyticCost(
            self.model,
            self.cluster,
            self.cluster.rates,
            layers,
            self.tensor_parallel,
            sequences,
            weights_apart=self.weights_once,
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a run; they hold for its stages and its size of micro-batch."""

    measured: MeasuredCost
    path: str
    estimated: Analytic | None = None  # stands in for memory that was not measured

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.measured.stages

    @property
    def text(self) -> str:
        """See `Source`."""
        where = "" if self.measured.placement is None else f" on {self.measured.placement.places} places"
        return f"measured on {self.stages} stages{where}, {self.measured.sequences} sequences at once ({self.path})"

    @property
    def about(self) -> Mapping[str, Any]:
        """See `Source`."""
        return self.measured.measured_on

    @property
    def overhead_s(self) -> float:
        """See `Source`."""
        return self.measured.overhead_s

    @property
    def weights_once(self) -> bool:
        """Whether weight gradients were made once per micro-batch."""
        return self.measured.measured_on.get("weight_gradients") == "micro_batch"

    @property
    def device_gb(self) -> float | None:
        """See `Source`: the memory that was free at the measurement."""
        limit = self.measured.memory_limit
        return None if limit is None else limit / GIGABYTE

    def cost(self, sequences: int) -> MeasuredCost:
        """See `Source`. Raises ConfigError for another size of micro-batch."""
        if sequences != self.measured.sequences:
            raise ConfigError(
                f"{self.path}: sequences: got {self.measured.sequences}, must be the {sequences} of a micro-batch, "
                f"use --sequences and --micro-batches for {self.measured.sequences} at once, or a measurement of {sequences}"
            )
        return self.measured

    def memory(self, sequences: int) -> MemoryModel | None:
        """See `Source`."""
        if self.measured.memory is None and self.estimated is not None:
            return self.estimated.memory(sequences)
        return self.measured.memory

    def chunked(self, sequences: int, chunks: int) -> Cost:
        """See `Source`: a chunk is taken as that part of its stage."""
        return _Parts(self.cost(sequences), self.stages, chunks)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Virtual stages, each a part of a measured stage."""

    whole: MeasuredCost
    stages: int
    chunks: int

    @property
    def sequences(self) -> int:
        return self.whole.sequences

    @property
    def max_length(self) -> int:
        return self.whole.max_length

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.whole.forward(stage % self.stages, length, context) * (1 / self.chunks)

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        return self.whole.backward(stage % self.stages, length, context) * (1 / self.chunks)

    def weights(self, stage: int, length: Tokens) -> Tokens:
        return self.whole.weights(stage % self.stages, length) * (1 / self.chunks)

    def message(self, boundary: int, length: Tokens) -> Tokens:
        # from the last device back to the first nothing was measured: the last boundary stands for it
        return self.whole.message(min(boundary % self.stages, self.stages - 2), length)
