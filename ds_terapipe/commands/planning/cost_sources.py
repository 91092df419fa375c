"""Sources of the seconds of ``plan`` and ``simulate``: a model on a cluster, measurements, or units without a cost.

A source has costs and memory of micro-batches of any number of ``sequences`` that it knows, the seconds of a step after its
last action (``overhead_s``), the memory of a device (``device_gb``, None if unknown), and says where they come from
(``text``, and ``about`` for a plan's file). Slices are multiples of its ``multiple`` tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice, pairwise
from typing import Any, TypeAlias

import numpy as np

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.plan.costs.analytic import AnalyticCost
from ds_terapipe.plan.costs.analytic_memory import analytic_memory
from ds_terapipe.plan.costs.cost import MeasuredCost, Tokens
from ds_terapipe.plan.costs.hardware import Cluster, Model
from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryModel
from ds_terapipe.plan.result import quantity
from ds_terapipe.plan.stages import LayerSeconds, even
from ds_terapipe.schedule import Placement


@dataclasses.dataclass(frozen=True)
class Units:
    """No cost was given: schedules can be drawn and compared all the same.

    It is its own `Cost`: forward of a whole sequence takes 1 on each stage, backward 2, messages nothing.
    """

    stages: int
    max_length: int
    weights_once: bool = False
    sequences: int = 1
    text: str = "unit costs: forward of a sequence 1, backward 2 on each stage, slices by their tokens, messages free"
    about: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"costs": "units"})
    overhead_s: float = 0.0
    device_gb: float | None = None
    multiple: int = 1

    def cost(self, sequences: int) -> Units:
        """Return the cost of micro-batches of so many sequences."""
        return dataclasses.replace(self, sequences=sequences)

    def memory(self, sequences: int) -> None:
        """Not known."""

    def forward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Return the forward time: the share of the sequence's tokens."""
        return length * (self.sequences / self.max_length)

    def backward(self, stage: int, length: Tokens, context: Tokens) -> Tokens:
        """Twice the forward, or as long where weight gradients are made apart."""
        return length * ((1 if self.weights_once else 2) * self.sequences / self.max_length)

    def weights(self, stage: int, length: Tokens) -> Tokens:
        """Return the time of separate weight gradients, that of a forward; 0 if they are not separate."""
        return length * (self.weights_once * self.sequences / self.max_length)

    def message(self, boundary: int, length: Tokens) -> Tokens:
        """No time."""
        return 0.0 * length


@dataclasses.dataclass(frozen=True)
class Analytic:
    """A model on a cluster, from operations and bytes; ``placement`` of its stages, None: one on each place."""

    model: Model
    cluster: Cluster
    layers: tuple[int, ...]
    tensor_parallel: int = 1
    data_parallel: int = 1
    shares_optimizer: bool = False  # among the replicas: ZeRO
    weights_once: bool = True
    fixed: bool = True  # whether the memory counts weights, gradients and optimiser
    sequence_parallel: bool = False
    placement: Placement | None = None

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def text(self) -> str:
        """Description of the model and its devices."""
        devices = self.stages * self.tensor_parallel * self.data_parallel
        return (
            f"{self.model.name} on {self.cluster.name}, estimated from datasheets: {self.stages} stages x "
            f"{self.tensor_parallel} tensor-parallel x {self.data_parallel} data-parallel = {devices} devices"
        )

    @property
    def about(self) -> Mapping[str, Any]:
        """Return the model, its devices and their rates, for a plan's file."""
        return {
            "costs": "analytic",
            "model": self.model.name,
            "cluster": self.cluster.name,
            "stage_layers": list(self.layers),
            "tensor_parallel": self.tensor_parallel,
            "sequence_parallel": self.multiple,
            "data_parallel": self.data_parallel,
            "rates": dataclasses.asdict(self.cluster.rates),
        }

    @property
    def overhead_s(self) -> float:
        """Seconds of a step after its last action."""
        return self.cost(1).step_overhead(self.data_parallel, self.is_within_node(self.data_parallel), self.placement)

    @property
    def multiple(self) -> int:
        """Devices that share the tokens of a slice."""
        return self.tensor_parallel if self.sequence_parallel else 1

    def is_within_node(self, replicas: int) -> bool:
        """Whether the replicas of a stage, which DeepSpeed numbers consecutively, fit into a node."""
        return replicas * self.tensor_parallel <= self.cluster.devices_per_node

    @property
    def device_gb(self) -> float:
        """Memory of a device in 1e9 bytes."""
        return self.cluster.memory_gb

    def cost(self, sequences: int) -> AnalyticCost:
        """Return the cost of micro-batches of so many sequences."""
        return AnalyticCost(
            self.model, self.cluster, self.cluster.rates, self.layers, self.tensor_parallel, sequences,
            weights_apart=self.weights_once, token_shares=self.multiple,
        )  # fmt: skip

    def memory(self, sequences: int) -> MemoryModel:
        """Return the memory of micro-batches of so many sequences."""
        shards = (self.data_parallel if self.shares_optimizer else 1) if self.fixed else None
        frozen = 0 if self.placement is None else self.placement.forward_only
        return analytic_memory(
            self.model, self.layers, self.tensor_parallel, sequences, self.weights_once, shards, self.multiple, frozen
        )

    def with_layout(self, layers: tuple[int, ...], tensor_parallel: int | None = None) -> Analytic:
        """Return the costs of the model in other stages, and with other tensor parallelism if given."""
        tensor = tensor_parallel or self.tensor_parallel
        return dataclasses.replace(self, layers=layers, tensor_parallel=tensor, placement=None)

    def on(self, placement: Placement) -> Analytic | None:
        """Return the costs of the model's stages on such places.

        A placement of a run has the layers of its stages. Otherwise several stages on a place have them evenly, as a run
        cuts them; None for fewer layers than stages, and for uneven stages of one's own.

        Raises:
            ConfigError: a run of fewer layers than the model's.
        """
        stages, count, entries = len(placement.stages), self.model.num_layers, placement.stages[-1].stop_layer
        if entries > stages:
            if entries < count:
                raise bad_value(
                    "--plan", f"{entries} layers", f"of {self.model.name}, {count} layers", "another --model"
                )
            first = min(1, entries - count)  # an embedding; the rest comes after the layers
            ends = [min(max(stage.stop_layer - first, 0), count) for stage in placement.stages]
            layers = tuple(stop - start for start, stop in pairwise([0, *ends]))
        elif count < stages or self.layers != even(count, self.stages):
            return None
        else:
            layers = even(count, stages)
        return dataclasses.replace(self, layers=layers, placement=placement)

    def layer_seconds(self, sequences: int, lengths: tuple[int, ...]) -> LayerSeconds:
        """Forward and backward of each layer over a micro-batch in these slices; embedding and head with their neighbours."""
        each = self.with_layout((1,) * self.model.num_layers).cost(sequences)
        length = np.array(lengths, dtype=float)
        context = np.cumsum(length) - length
        seconds = (
            float(np.sum(each.forward(n, length, context) + each.backward(n, length, context)))
            + float(each.weights(n, float(sum(lengths))))
            for n in range(self.model.num_layers)
        )
        return LayerSeconds(tuple(tuple(islice(seconds, count)) for count in self.layers))


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a run; they hold for its stages and its size of micro-batch."""

    measured: MeasuredCost
    path: str

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.measured.stages

    @property
    def text(self) -> str:
        """Description of the measurements."""
        placement = self.measured.placement
        where = "" if placement.is_plain else f" on {placement.places} places"
        sequences = quantity(self.measured.sequences, "sequence")
        return f"measured on {quantity(self.stages, 'stage')}{where}, {sequences} at once ({self.path})"

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts of the run, for a plan's file."""
        return self.measured.measured_on

    @property
    def overhead_s(self) -> float:
        """Seconds of a step outside of its schedule."""
        return self.measured.overhead_s

    @property
    def weights_once(self) -> bool:
        """Whether weight gradients were made once per micro-batch."""
        return self.measured.measured_on.get("weight_gradients") == "micro_batch"

    @property
    def multiple(self) -> int:
        """Devices that share the tokens of a slice."""
        return int(self.measured.measured_on.get("sequence_parallel", 1))

    @property
    def device_gb(self) -> float | None:
        """The memory that was free at the measurement."""
        limit = self.measured.memory_limit
        return None if limit is None else limit / GIGABYTE

    def cost(self, sequences: int) -> MeasuredCost:
        """Return the measured cost. Raises ConfigError for another size of micro-batch."""
        if sequences != self.measured.sequences:
            raise ConfigError(
                f"{self.path}: sequences: got {self.measured.sequences}, must be the {sequences} of a micro-batch, "
                f"use --sequences and --micro-batches for {self.measured.sequences} at once, or a measurement of {sequences}"
            )
        return self.measured

    def memory(self, sequences: int) -> MemoryModel | None:
        """Return the measured memory."""
        return self.measured.memory


Source: TypeAlias = Analytic | Measured | Units
