"""What the pipelines of megatron-core's layers have in common: their stages, their layout, and which settings are followed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core.transformer.transformer_config import TransformerConfig

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.parallel import adopt_topology, initialize_parallel

PositionEmbedding = Literal["learned", "rope"]

# Settings of a TransformerConfig that change what a layer computes and that the layers here do not follow.
_ONLY: dict[str, tuple[Any, str]] = {
    "context_parallel_size": (1, "sequences are cut into slices in time, not over processes"),
    "sequence_parallel": (False, "gradients of sequence parallel parameters are not reduced"),
    "num_moe_experts": (None, "mixtures of experts are not built"),
    "mtp_num_layers": (None, "multi-token prediction is not built"),
    "multi_latent_attention": (False, "only self-attention is built"),
    "experimental_attention_variant": (None, "only self-attention is built"),
    "window_size": (None, "attention is over the whole context"),
    "softmax_type": ("vanilla", "attention goes through PyTorch's scaled dot product attention"),
    "fp32_residual_connection": (False, "tensors between stages have the model's type"),
    "recompute_granularity": (None, "use DeepSpeed's activation checkpointing"),
    "fp8": (None, "the local layers have no fp8"),
    "fp4": (None, "the local layers have no fp4"),
    "cpu_offloading": (False, "activations stay where they are"),
    "fine_grained_activation_offloading": (False, "activations stay where they are"),
    "virtual_pipeline_model_parallel_size": (None, "DeepSpeed's pipeline has one part of the model a stage"),
}


class CorePipeline(PipelineModule):
    """A ``PipelineModule`` whose stages are given, not searched for.

    Args:
        layers: specs of all layers. Those before the first and after the last Transformer layer belong to the first and the
            last stage, ``layers_around`` says how many they are.
        layers_per_stage: Transformer layers of each stage; None: even, earlier stages first.
        topology: the layout.
        arguments: further ones of ``PipelineModule``.

    Raises:
        ConfigError: ``layers_per_stage`` are not positive numbers, one for each stage, that add up to all Transformer layers.
    """

    layer_class: type  # of the Transformer layers, which are what activation checkpoints are made of

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layers_per_stage: Sequence[int] | None,
        topology: ProcessTopology,
        **arguments: Any,
    ) -> None:
        kinds = [spec.typename is self.layer_class for spec in layers]
        before = kinds.index(True) if any(kinds) else 0
        self.layers_around = before, len(layers) - before - sum(kinds)
        stages = max(1, topology.get_dim("pipe"))
        self._boundaries = stage_boundaries(sum(kinds), stages, layers_per_stage, self.layers_around)
        super().__init__(layers, topology=topology, checkpointable_layers=[self.layer_class.__name__], **arguments)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Transformer layers of each stage as it is now: ``elastic_pipeline`` moves them, and may leave a stage without any."""
        before, after = self.layers_around
        first, end = before, self._num_layers - after
        return tuple(max(0, min(stop, end) - max(start, first)) for start, stop in pairwise(self.parts))

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._boundaries
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def layout_of(config: TransformerConfig, num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    """The layout that a model is built for: the one that is given, or a new one; collective.

    Raises:
        ConfigError: the sizes don't fit the processes, or what megatron-core is set up for.
    """
    if topology is None:
        return initialize_parallel(tensor=config.tensor_model_parallel_size, pipeline=num_stages or 1)
    adopt_topology(topology)
    return topology


def core_config(config: TransformerConfig) -> TransformerConfig:
    """The configuration as the layers get it: weights made on the CPU, and a pipeline that is not megatron-core's."""
    config = copy.copy(config)
    config.use_cpu_initialization = True
    config.pipeline_model_parallel_size = 1
    config.pipeline_model_parallel_layout = None
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    return config


def stage_boundaries(
    num_layers: int, stages: int, layers_per_stage: Sequence[int] | None, around: tuple[int, int]
) -> list[int]:
    """Where each stage starts in the list of layers, and the end; ``around``: layers before and after the Transformer layers.

    Raises:
        ConfigError: ``layers_per_stage`` are not positive numbers, one for each stage, that add up to ``num_layers``.
    """
    if layers_per_stage is None:
        layers_per_stage = [num_layers // stages + (stage < num_layers % stages) for stage in range(stages)]
    counts = list(layers_per_stage)
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"layers per stage: got {counts} for {num_layers} layers, must be {stages} positive numbers that add up to "
            f"{num_layers}, use at most {num_layers} stages"
        )
    counts[0] += around[0]
    counts[-1] += around[1]
    return [0, *accumulate(counts)]


def position_table(kind: str, positions: int | None, seq_length: int) -> int | None:
    """Rows of the table of learned positions, None for rotary ones.

    Args:
        kind: the argument ``position_embedding``.
        positions: ``max_position_embeddings``; None: as many as a sequence is long.
        seq_length: longest sequence in tokens.

    Raises:
        ConfigError: there is no such kind, or the table is shorter than a sequence.
    """
    if kind not in ("learned", "rope"):
        raise ConfigError(f'position_embedding: got "{kind}", must be "learned" or "rope", use "rope"')
    if kind == "rope":
        return None
    if positions is not None and positions < seq_length:
        raise ConfigError(f"max_position_embeddings: got {positions}, must be at least seq_length, use {seq_length}")
    return positions or seq_length


def check_config(config: TransformerConfig, topology: ProcessTopology, **sizes: int) -> None:
    """Raise for what the layers here do not follow.

    Args:
        config: megatron-core's description of the layers.
        topology: the layout.
        sizes: what is shared among the tensor parallel ranks besides attention heads, by name, such as ``vocab_size``.

    Raises:
        ConfigError: a size that does not divide, or a setting that is not followed.
    """
    tensor = max(1, topology.get_dim("model"))
    if config.tensor_model_parallel_size != tensor:
        raise ConfigError(
            f"tensor_model_parallel_size: got {config.tensor_model_parallel_size}, must be that of the topology, use {tensor}"
        )
    for name, size in {**sizes, "num_query_groups": config.num_query_groups}.items():
        if size % tensor:
            raise ConfigError(
                f"{name}: got {size}, must be a multiple of the tensor parallel size, use e.g. {-(-size // tensor) * tensor}"
            )
    if config.qk_layernorm and tensor > 1:
        raise ConfigError(
            "qk_layernorm: got true, must be false under tensor parallelism, use tensor_model_parallel_size 1"
        )
    for name, (allowed, reason) in _ONLY.items():
        value = getattr(config, name, allowed)
        if value != allowed:
            raise ConfigError(f"TransformerConfig.{name}: got {value!r}, must be {allowed!r}: {reason}")
