"""Layers of a GPT pipeline: embedding, Transformer layer, final norm, output head, and parts for other pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.megatron.attention import CausalAttention, HeadNorm, Norm, rotary_embedding
from ds_terapipe.megatron.parallel import process_groups
from ds_terapipe.pipeline.operators.context import current_span
from ds_terapipe.pipeline.operators.deferred import deferred_linear
from ds_terapipe.pipeline.operators.interception import defers

NO_DOCUMENTS = (
    "--reset-attention-mask: got a model without token_pipeline, must have that key, which keeps documents apart, use "
    '"token_pipeline": {"slices": 1} in ds_config.json'
)


class Rotary(NamedTuple):
    """Rotary positions: the part of the head dimension that is rotated, and the base of the frequencies."""

    percent: float = 1.0
    base: int = 10000


@contextlib.contextmanager
def random_stream(seed: int) -> Iterator[None]:
    """Random numbers from ``seed`` on the CPU, the state outside untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def table(config: TransformerConfig, rows: int) -> nn.Embedding:
    """Make an embedding of so many rows, whole on every tensor parallel rank."""
    made = nn.Embedding(rows, config.hidden_size, dtype=config.params_dtype)
    if config.perform_initialization:
        config.embedding_init_method(made.weight)
    return made


class Embedding(nn.Module):
    """Word embedding over the tensor parallel group, plus learned positions, plus token types where there are any."""

    def __init__(
        self, config: TransformerConfig, vocab_size: int, positions: int | None, seed: int, token_types: int = 0
    ) -> None:
        super().__init__()
        self.group = process_groups().tp
        self.sequence_parallel = config.sequence_parallel
        with random_stream(seed):
            self.word_embeddings = VocabParallelEmbedding(
                num_embeddings=vocab_size,
                embedding_dim=config.hidden_size,
                init_method=config.embedding_init_method,
                config=config,
                tp_group=self.group,
            )
            self.position_embeddings = table(config, positions) if positions is not None else None
            self.tokentype_embeddings = table(config, token_types) if token_types else None
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """(tokens [b, s], position ids [b, s]) to [s, b, hidden], or this rank's share of it."""
        return self.embed(*inputs)

    def embed(self, tokens: Tensor, position_ids: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Tokens, their positions and types, [b, s] each or what is broadcast to it, to [s, b, hidden]."""
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids)
        if self.tokentype_embeddings is not None:
            hidden = hidden + self.tokentype_embeddings(token_types)
        hidden = hidden.transpose(0, 1).contiguous()
        if self.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.group)
        return cast(Tensor, self.dropout(hidden))


@defers
def tied_logits(embedding: Embedding, hidden: Tensor) -> Tensor:
    """[s, b, hidden] to this process's logits [s, b, vocabulary / tensor parallel size], by the embedding's table."""
    enter = copy_to_tensor_model_parallel_region
    if embedding.sequence_parallel:
        enter = gather_from_sequence_parallel_region
    hidden = enter(hidden, group=embedding.group)
    return deferred_linear(hidden, embedding.word_embeddings.weight)


class CoreLayer(TransformerLayer):
    """megatron-core's Transformer layer, with modules that need neither CUDA nor fused kernels.

    Args:
        config: as :func:`~ds_terapipe.megatron.common.core_config` gives it.
        spec: modules of the layer.
        number: of the layer, from 1.
        rotary: rotary positions; None: none.
        seed: of the initial weights.
    """

    def __init__(
        self, config: TransformerConfig, spec: ModuleSpec, number: int, rotary: Rotary | None, seed: int
    ) -> None:
        groups = process_groups()
        with random_stream(seed):
            super().__init__(config, spec.submodules, layer_number=number, pg_collection=groups)
        self.rotary = None
        if rotary is not None:
            self.rotary = RotaryEmbedding(
                kv_channels=config.kv_channels,
                rotary_percent=rotary.percent,
                rotary_base=rotary.base,
                rotary_interleaved=config.rotary_interleaved,
                use_cpu_initialization=True,
                cp_group=groups.cp,
            )

    def run(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """[s, b, hidden] to the same; ``mask`` is the attention's, see there."""
        angles = None
        if self.rotary is not None:
            span = current_span()
            tokens = hidden.shape[0] * (process_groups().tp.size() if self.config.sequence_parallel else 1)
            angles = rotary_embedding(self.rotary, span.start if span else 0, tokens, hidden.device)
        return cast(Tensor, super().forward(hidden, attention_mask=mask, rotary_pos_emb=angles)[0])


class GPTLayer(CoreLayer):
    """A causal Transformer layer, with attention that can be run slice by slice.

    ``several``: a sequence may have several documents, which only our engine keeps apart.
    """

    def __init__(
        self, config: TransformerConfig, number: int, rotary: Rotary | None, seed: int, several: bool = False
    ) -> None:
        spec = without_kernels(get_gpt_layer_local_spec(), config, CausalAttention)
        super().__init__(config, spec, number, rotary, seed)
        self._several = several

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, hidden] to the same; ``s`` tokens of a slice or of a whole sequence."""
        if self._several and current_span() is None:
            raise ConfigError(NO_DOCUMENTS)
        return self.run(hidden)


def without_kernels(spec: ModuleSpec, config: TransformerConfig, attention: type[nn.Module]) -> ModuleSpec:
    """The spec of a local layer, changed in place where modules need CUDA or fused kernels.

    Norms are PyTorch's, and ``attention`` stands between queries, keys and values.
    """
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = attention
    if config.qk_l2_norm or config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = HeadNorm
    return spec


class FinalNorm(nn.Module):
    """The norm after the last layer: [s, b, hidden] to the same."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.norm(hidden))


def output_layer(
    config: TransformerConfig, vocab_size: int, seed: int, init: Callable[..., Any], bias: bool
) -> ColumnParallelLinear:
    """A separate table for the logits, divided among the tensor parallel ranks."""
    with random_stream(seed):
        return ColumnParallelLinear(
            config.hidden_size, vocab_size, config=config, init_method=init, bias=bias, tp_group=process_groups().tp
        )


class OutputHead(nn.Module):
    """An output head with its own weights: [s, b, hidden] to [s, b, vocabulary / tensor parallel size]."""

    def __init__(self, config: TransformerConfig, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.output_layer = output_layer(config, vocab_size, seed, config.init_method, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.output_layer(hidden)[0])


def with_vocabulary(
    embedding: type[nn.Module],
    arguments: tuple[Any, ...],
    body: Sequence[LayerSpec],
    logits: Callable[..., Any],
    own: LayerSpec | None,
) -> list[LayerSpec]:
    """Put layers between a word embedding and the logits.

    Args:
        embedding, arguments: class of the first layer, and configuration, vocabulary, positions, seed and more for it.
        body: the layers between.
        logits: makes the logits from the embedding's table.
        own: makes them from another one; None: they are made from the embedding's.
    """
    if own is not None:
        return [LayerSpec(embedding, *arguments), *body, own]
    config, vocab_size, _, seed, *_ = arguments
    tied = partial(TiedLayerSpec, "embedding", embedding, tied_weight_attr="word_embeddings.weight")
    # On the last of several stages this is a module of its own: it gets the shared table, no positions and no types.
    return [tied(*arguments), *body, tied(config, vocab_size, None, seed, forward_fn=logits)]
