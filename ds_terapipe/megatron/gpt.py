"""GPT as a DeepSpeed ``PipelineModule`` of megatron-core's layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core.transformer.transformer_config import TransformerConfig

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.layers import Embedding, FinalNorm, GPTLayer, OutputHead, Rotary, tied_logits
from ds_terapipe.megatron.loss import TokenLoss
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


class GPTPipeline(PipelineModule):
    """A ``PipelineModule`` whose stages are given, not searched for.

    Layers: embedding, ``num_layers`` Transformer layers, final norm, output head. Input: (tokens, position ids), both
    [b, s] int64. Between layers: [s, b, hidden]. Output: logits [s, b, vocabulary / tensor parallel size].

    ``layers_around`` says how many layers before and after the Transformer layers belong to the first and the last stage.
    """

    layers_around = (1, 2)

    def __init__(self, layers: Sequence[LayerSpec], boundaries: Sequence[int], **arguments: Any) -> None:
        self._boundaries = list(boundaries)
        super().__init__(layers, checkpointable_layers=[GPTLayer.__name__], **arguments)

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


def gpt_pipeline(
    config: TransformerConfig,
    *,
    vocab_size: int,
    seq_length: int,
    num_stages: int | None = None,
    topology: ProcessTopology | None = None,
    position_embedding: PositionEmbedding = "learned",
    tied: bool = True,
    max_position_embeddings: int | None = None,
    rotary_percent: float = 1.0,
    rotary_base: int = 10000,
    layers_per_stage: Sequence[int] | None = None,
    seed: int = 1234,
    loss_fn: Callable[..., Any] | None = None,
    **pipeline: Any,
) -> GPTPipeline:
    """Build a GPT as a pipeline. Every process calls it, after ``deepspeed.init_distributed``.

    The weights are those of ``seed``, whatever the layout: each layer draws its whole weights on the CPU from its own
    random stream and keeps its part of them.

    Args:
        config: megatron-core's description of the layers. ``tensor_model_parallel_size`` counts, the pipeline sizes don't.
        vocab_size: padded size of the vocabulary, a multiple of the tensor parallel size.
        seq_length: longest sequence in tokens.
        num_stages: pipeline stages; or
        topology: the layout, as :func:`initialize_parallel` returns it.
        position_embedding: ``"learned"`` (from the position ids) or ``"rope"`` (rotary).
        tied: whether the output head uses the word embedding.
        max_position_embeddings: size of the learned position table, default ``seq_length``.
        rotary_percent: part of the head dimension that is rotated.
        rotary_base: base of the rotary frequencies.
        layers_per_stage: Transformer layers of each stage, default even, earlier stages first.
        seed: of the initial weights.
        loss_fn: default :class:`TokenLoss`.
        pipeline: further arguments of ``PipelineModule``, such as ``activation_checkpoint_interval``.

    Raises:
        ConfigError: a size that does not divide, a stage without a layer, or a setting that is not followed.
    """
    if topology is None:
        topology = initialize_parallel(tensor=config.tensor_model_parallel_size, pipeline=num_stages or 1)
    else:
        adopt_topology(topology)
    stages, tensor = max(1, topology.get_dim("pipe")), max(1, topology.get_dim("model"))
    positions = max_position_embeddings or seq_length
    _check_config(config, tensor, vocab_size)
    if position_embedding not in ("learned", "rope"):
        raise ConfigError(f'position_embedding: got "{position_embedding}", must be "learned" or "rope", use "rope"')
    if position_embedding == "learned" and positions < seq_length:
        raise ConfigError(f"max_position_embeddings: got {positions}, must be at least seq_length, use {seq_length}")
    specs = _layer_specs(
        _core_config(config),
        vocab_size=vocab_size,
        positions=positions if position_embedding == "learned" else None,
        rotary=Rotary(rotary_percent, rotary_base) if position_embedding == "rope" else None,
        tied=tied,
        seed=seed,
    )
    boundaries = _boundaries(config.num_layers, stages, layers_per_stage)
    return GPTPipeline(specs, boundaries, topology=topology, loss_fn=loss_fn or TokenLoss(), **pipeline)


def _layer_specs(
    config: TransformerConfig, *, vocab_size: int, positions: int | None, rotary: Rotary | None, tied: bool, seed: int
) -> list[LayerSpec]:
    last = config.num_layers + 1
    layers = [LayerSpec(GPTLayer, config, number, rotary, seed + number) for number in range(1, last)]
    norm = LayerSpec(FinalNorm, config)
    if not tied:
        first = LayerSpec(Embedding, config, vocab_size, positions, seed)
        return [first, *layers, norm, LayerSpec(OutputHead, config, vocab_size, seed + last)]
    weight = "word_embeddings.weight"
    first = TiedLayerSpec("embedding", Embedding, config, vocab_size, positions, seed, tied_weight_attr=weight)
    # On the last of several stages this is a module of its own: it gets the shared table, and no positions.
    head = TiedLayerSpec(
        "embedding", Embedding, config, vocab_size, None, seed, tied_weight_attr=weight, forward_fn=tied_logits
    )
    return [first, *layers, norm, head]


def _core_config(config: TransformerConfig) -> TransformerConfig:
    """The configuration as the layers get it: weights made on the CPU, and a pipeline that is not megatron-core's."""
    config = copy.copy(config)
    config.use_cpu_initialization = True
    config.pipeline_model_parallel_size = 1
    config.pipeline_model_parallel_layout = None
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    return config


def _boundaries(num_layers: int, stages: int, layers_per_stage: Sequence[int] | None) -> list[int]:
    """Where each stage starts in [embedding, layers, norm, head], and the end."""
    if layers_per_stage is None:
        layers_per_stage = [num_layers // stages + (stage < num_layers % stages) for stage in range(stages)]
    counts = list(layers_per_stage)
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"layers per stage: got {counts} for {num_layers} layers, must be {stages} positive numbers that add up to "
            f"{num_layers}, use at most {num_layers} stages"
        )
    counts[0] += GPTPipeline.layers_around[0]
    counts[-1] += GPTPipeline.layers_around[1]
    return [0, *accumulate(counts)]


def _check_config(config: TransformerConfig, tensor: int, vocab_size: int) -> None:
    if config.tensor_model_parallel_size != tensor:
        raise ConfigError(
            f"tensor_model_parallel_size: got {config.tensor_model_parallel_size}, must be that of the topology, use {tensor}"
        )
    for name, size in (("vocab_size", vocab_size), ("num_query_groups", config.num_query_groups)):
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
