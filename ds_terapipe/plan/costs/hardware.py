"""Clusters and models: figures of a datasheet, ranges of open rates, and the user's files.

A `Cluster` holds what a vendor prints. How much of it a training step reaches is another matter: `Cluster.ranges` gives,
for each of the nine rates of `analytic`, the range in which it must lie and why. Its geometric middle is the guess without
any measurement (`Cluster.rates`), its half width the spread of the prior with which rates are calibrated.

Sources: TeraPipe (Li et al., arXiv 2102.07988), table 1, for `MODELS`; the AWS instance table and NVIDIA's V100 datasheet
for `CLUSTERS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ds_terapipe.json_files import Fields, read_json


class Range(NamedTuple):
    """Range of a rate, with its reason; one standard deviation to either side of the geometric middle."""

    low: float
    high: float
    why: str

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)


@dataclasses.dataclass(frozen=True)
class Rates:
    """The nine parameters of the analytic cost, all positive.

    Attributes:
        launch_s: seconds that a layer takes forward and backward however few tokens there are (kernel launches).
        flops: operations per second of the linear layers.
        attention_flops: operations per second of attention's two products.
        weight_passes: how often a slice, forward and backward, reads or writes a layer's 16-bit weights or gradients.
        score_bytes: memory traffic per attention score, forward and backward, in bytes.
        latency_s: seconds before the first byte of a message between stages.
        message_bytes_per_s: bandwidth of a message between stages.
        all_reduce_bytes_per_s: bandwidth of all-reduces within a node: those of tensor parallelism, gradients of its replicas.
        gradient_bytes_per_s: bandwidth of one node for the all-reduce of gradients, shared by its devices.
    """

    launch_s: float
    flops: float
    attention_flops: float
    weight_passes: float
    score_bytes: float
    latency_s: float
    message_bytes_per_s: float
    all_reduce_bytes_per_s: float
    gradient_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices, as a datasheet describes them.

    Attributes:
        devices_per_node: devices in a node; they share its network card.
        peak_tflops: 16-bit matrix operations of a device, in 1e12 per second.
        memory_gb: memory of a device, in 1e9 bytes.
        memory_gb_per_s: its bandwidth, in 1e9 bytes per second.
        link_gb_per_s: bandwidth of a device to the others of its node over all its links, one way.
        slowest_link_gb_per_s: the slowest single link between two of them.
        node_gb_per_s: bandwidth of a node to other nodes.
        rates_known: measured or calibrated values that take the place of the ranges' middles, by name.
    """

    name: str
    devices_per_node: int
    peak_tflops: float
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float
    slowest_link_gb_per_s: float
    node_gb_per_s: float
    rates_known: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ranges(self) -> dict[str, Range]:
        """The range of each of the nine rates, by its name in `Rates`."""
        peak, node = self.peak_tflops * 1e12, self.node_gb_per_s * 1e9
        return {
            "launch_s": Range(0.5e-3, 2e-3, "60 to 200 kernels in a layer's forward and backward, 8 to 10 µs each"),
            "flops": Range(0.4 * peak, 0.9 * peak, "0.4 to 0.9 of the peak in large matrix products"),
            "attention_flops": Range(0.2 * peak, 0.6 * peak, "batched products with an inner dimension of a head only"),
            "weight_passes": Range(
                4.5, 8.0, "6 counted: weights read twice, gradient written, read, sum read, written"
            ),
            "score_bytes": Range(
                30.0, 120.0, "60 counted: unfused scale, mask, casts and fp32 softmax, both directions"
            ),
            "latency_s": Range(0.1e-3, 0.4e-3, "two collectives in a row, one over TCP between nodes"),
            "message_bytes_per_s": Range(0.6 * node, node, "0.6 to 1 of the node's network"),
            "all_reduce_bytes_per_s": Range(
                self.slowest_link_gb_per_s * 1e9, self.link_gb_per_s * 1e9, "from one ring over the slowest link to all"
            ),
            "gradient_bytes_per_s": Range(
                0.5 * node, node, "0.5 to 1 of the node's network, by all its devices at once"
            ),
        }

    @property
    def rates(self) -> Rates:
        """Rates that are known, and the middle of the range for the others."""
        return Rates(**{name: self.rates_known.get(name, known.middle) for name, known in self.ranges.items()})


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder-only Transformer, in Megatron's terms. Sizes in elements; 0 stands for Megatron's default.

    Attributes:
        vocab_size: 0 leaves out embedding, output head and loss, as the reference implementation of TeraPipe does.
        untie_embeddings_and_output_weights: whether the head has a table of its own.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int = 0
    num_query_groups: int = 0
    kv_channels: int = 0
    vocab_size: int = 0
    swiglu: bool = False
    untie_embeddings_and_output_weights: bool = False

    @property
    def attention_size(self) -> int:
        """Heads times the size of a head."""
        return self.num_attention_heads * (self.kv_channels or self.hidden_size // self.num_attention_heads)

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    def divides_by(self, tensor: int) -> bool:
        """Whether so many tensor-parallel devices can share a layer, by megatron-core's rule (0.16)."""
        groups = self.groups
        return self.num_attention_heads % tensor == 0 and (groups % tensor == 0 or tensor % groups == 0)

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer's matrices (12 H² in a GPT of the standard shape)."""
        keys = self.attention_size * self.groups // self.num_attention_heads
        attention = self.hidden_size * (2 * self.attention_size + 2 * keys)
        return attention + (3 if self.swiglu else 2) * self.hidden_size * (self.ffn_hidden_size or 4 * self.hidden_size)


def load_cluster(name_or_path: str) -> Cluster:
    """A published cluster by name, or a user's JSON file with the fields of `Cluster` (``rates``: any of `Rates`).

    Raises:
        ConfigError: no such name or file, no JSON object, a field that is unknown, missing or has a bad value.
    """
    if name_or_path in CLUSTERS:
        return CLUSTERS[name_or_path]
    fields = read_json(name_or_path, f"a JSON file or one of {', '.join(CLUSTERS)}")
    sizes = {field.name for field in dataclasses.fields(Cluster)} - {"name", "rates_known"}
    fields.only(sizes | {"name", "rates"})
    rates = Fields(fields.block("rates", default={}), fields.path("rates"))
    rates.only({field.name for field in dataclasses.fields(Rates)})
    found: dict[str, Any] = {key: fields.positive(key) for key in sorted(sizes)}
    found["devices_per_node"] = fields.count("devices_per_node")
    if found["slowest_link_gb_per_s"] > found["link_gb_per_s"]:
        raise fields.fail(
            "slowest_link_gb_per_s", f"at most link_gb_per_s ({found['link_gb_per_s']})",
            "the same value for a node with one kind of link",
        )  # fmt: skip
    known = {key: rates.positive(key) for key in fields.block("rates", default={})}
    return Cluster(name=fields.text("name", Path(name_or_path).stem), rates_known=known, **found)


def load_model(name_or_path: str) -> Model:
    """A published model by name, or a user's JSON file with the fields of `Model`, which are Megatron's.

    Raises:
        ConfigError: as in `load_cluster`.
    """
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    fields = read_json(name_or_path, f"a JSON file or one of {', '.join(MODELS)}")
    flags = {"swiglu", "untie_embeddings_and_output_weights"}
    counts = {field.name for field in dataclasses.fields(Model)} - {"name", *flags}
    fields.only({"name", *counts, *flags})
    needed = {"num_layers", "hidden_size", "num_attention_heads"}
    found: dict[str, Any] = {
        key: fields.count(key) for key in sorted(counts) if key in needed or fields.value(key) is not None
    }
    heads, groups = found["num_attention_heads"], found.get("num_query_groups", 1)
    if found["hidden_size"] % heads and "kv_channels" not in found:
        raise fields.fail("num_attention_heads", f"a divisor of hidden_size ({found['hidden_size']})", "kv_channels")
    if heads % groups:
        raise fields.fail("num_query_groups", f"a divisor of {heads} heads", str(heads))
    return Model(
        fields.text("name", Path(name_or_path).stem), **found, **{key: fields.flag(key, False) for key in flags}
    )


# V100-SXM2 of 16 GB. The network is 25 Gbit/s; NVLinks of 25 GB/s, some of them double, join a node's devices (a hybrid cube
# mesh), 150 GB/s from each.
CLUSTERS = {
    "p3.16xlarge": Cluster(
        name="p3.16xlarge",
        devices_per_node=8,
        peak_tflops=125.0,
        memory_gb=16.0,
        memory_gb_per_s=900.0,
        link_gb_per_s=150.0,
        slowest_link_gb_per_s=25.0,
        node_gb_per_s=3.125,
    )
}

MODELS = {
    model.name: model
    for model in (
        Model("gpt3-1b", 24, 2048, 16),
        Model("gpt3-13b", 40, 5120, 40),
        Model("gpt3-44b", 96, 6144, 48),
        Model("gpt3-175b", 96, 12288, 96),
    )
}
