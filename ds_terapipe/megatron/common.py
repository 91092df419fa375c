"""Code shared by the pipelines of megatron-core's layers: their layout, and the settings that they follow."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core.transformer.transformer_config import TransformerConfig

from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.megatron.parallel import adopt_topology, initialize_parallel

PositionEmbedding = Literal["learned", "rope"]

# Settings of a TransformerConfig that change what a layer computes and that the layers here do not follow.
_ONLY: dict[str, tuple[Any, str]] = {
    "context_parallel_size": (1, "sequences are cut into slices in time, not over processes"),
    "num_moe_experts": (None, "mixtures of experts are not built"),
    "mtp_num_layers": (None, "multi-token prediction is not built"),
    "multi_latent_attention": (False, "only self-attention is built"),
    "experimental_attention_variant": (None, "only self-attention is built"),
    "window_size": (None, "attention is over the whole context"),
    "use_mup": (False, "embeddings, logits and learning rates are not scaled by the width"),
    "qk_clip": (False, "no step clips queries and keys after the optimizer's"),
    "layernorm_zero_centered_gamma": (False, "norms are PyTorch's, which multiply by their weights"),
    "softmax_type": ("vanilla", "attention goes through PyTorch's scaled dot product attention"),
    "heterogeneous_block_specs": (False, "all layers are alike"),
    "calculate_per_token_loss": (False, "the loss of a step is the mean of its micro-batches' means"),
    "enable_autocast": (False, "use DeepSpeed's torch_autocast"),
    "cuda_graph_impl": ("none", "slices of a layer have several lengths"),
    "fp32_residual_connection": (False, "tensors between stages have the model's type"),
    "recompute_granularity": (None, "use DeepSpeed's activation checkpointing"),
    "fp8": (None, "the local layers have no fp8"),
    "fp4": (None, "the local layers have no fp4"),
    "cpu_offloading": (False, "activations stay where they are"),
    "fine_grained_activation_offloading": (False, "activations stay where they are"),
    **dict.fromkeys(
        ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"),
        (None, "use the argument layers_per_stage"),
    ),
    **dict.fromkeys(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        (False, "use the argument layers_per_stage"),
    ),
    "virtual_pipeline_model_parallel_size": (None, "DeepSpeed's pipeline has one part of the model a stage"),
}


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
    return config


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


def check_config(
    config: TransformerConfig, topology: ProcessTopology, *, shares_tokens: bool = False, **sizes: int
) -> None:
    """Refuse settings that these layers do not follow.

    Args:
        config: megatron-core's description of the layers.
        topology: the layout.
        shares_tokens: whether the layers follow ``sequence_parallel``.
        sizes: sizes divided among the tensor parallel ranks besides attention heads, by name, such as ``vocab_size``.

    Raises:
        ConfigError: a size that does not divide, or a setting that is not followed.
    """
    _check_sizes(config, topology, sizes)
    whole = {} if shares_tokens else {"sequence_parallel": (False, "its layers have all tokens on each rank")}
    for name, (allowed, reason) in {**_ONLY, **whole}.items():
        value = getattr(config, name, allowed)
        if value != allowed:
            raise ConfigError(f"TransformerConfig.{name}: got {value!r}, must be {allowed!r}: {reason}")


def _check_sizes(config: TransformerConfig, topology: ProcessTopology, sizes: Mapping[str, int]) -> None:
    tensor = max(1, topology.get_dim("model"))
    if config.tensor_model_parallel_size != tensor:
        raise ConfigError(
            f"tensor_model_parallel_size: got {config.tensor_model_parallel_size}, must be that of the topology, use {tensor}"
        )
    heads, groups = config.num_attention_heads, config.num_query_groups
    if groups < 1 or heads % groups:
        raise bad_value("num_query_groups", groups, f"a divisor of num_attention_heads ({heads})", f"e.g. {heads}")
    for name, size in {**sizes, "num_query_groups": config.num_query_groups}.items():
        if size % tensor:
            raise ConfigError(
                f"{name}: got {size}, must be a multiple of the tensor parallel size, use e.g. {-(-size // tensor) * tensor}"
            )
