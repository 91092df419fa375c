"""Hugging Face's decoder layers as layers of a ``PipelineModule``, written as a user writes them: a wrapper around each.

The wrappers know positions from ``current_span``, nothing of slices beyond that. Everything is random and tiny.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig
from transformers.integrations import sdpa_attention
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

from ds_terapipe.pipeline.operators.context import current_span
from tests.pipeline.models import HEADS, HIDDEN, POSITIONS, VOCABULARY, Head, micro_batch

LENGTH, WINDOW = 24, 5
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 4, "max_position_embeddings": POSITIONS, "attn_implementation": "sdpa",
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
FAMILIES: dict[str, tuple[type[nn.Module], type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaDecoderLayer, LlamaConfig, GROUPED),
    "mistral": (MistralDecoderLayer, MistralConfig, GROUPED | {"sliding_window": WINDOW}),
    "gpt2": (GPT2Block, GPT2Config, {"n_inner": 2 * HIDDEN, "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
    "bert": (BertLayer, BertConfig, {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}


def positions_of(tokens: Tensor) -> Tensor:
    """Positions [1, s] of a slice's tokens [b, s, ...] in their sequence."""
    span = current_span()
    start = 0 if span is None else span.start
    return torch.arange(start, start + tokens.shape[1])[None]


class Tokens(nn.Module):
    """Token ids [b, s], or with them a mask [b, 1, s, context + s], to hidden states [b, s, hidden] and the mask."""

    def __init__(self, positions: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(POSITIONS, HIDDEN) if positions else None

    def forward(self, inputs: Any) -> Any:
        tokens, *mask = inputs if isinstance(inputs, tuple) else (inputs,)
        hidden = self.tokens(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(positions_of(tokens))
        return (hidden, *mask) if mask else hidden


class Decoder(nn.Module):
    """A layer of Hugging Face's: hidden states [b, s, hidden], or with them a mask that it hands on."""

    def __init__(self, layer: type[nn.Module], config: PreTrainedConfig, index: int) -> None:
        super().__init__()
        self.layer = layer(config, layer_idx=index)
        self.rotary = LlamaRotaryEmbedding(config) if hasattr(config, "rope_parameters") else None

    def forward(self, inputs: Any) -> Any:
        hidden, *mask = inputs if isinstance(inputs, tuple) else (inputs,)
        given: dict[str, Any] = {"attention_mask": mask[0] if mask else None}
        if self.rotary is not None:
            positions = positions_of(hidden)
            given.update(position_ids=positions, position_embeddings=self.rotary(hidden, positions))
        outputs = self.layer(hidden, **given)
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs  # a tuple from some layers of older versions
        return (hidden, *mask) if mask else hidden


class NotCausal(Decoder):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer.self_attn.is_causal = False


class Later(Decoder):
    """A layer that stands aside in the first ``calls_aside`` calls with gradients, and in all without."""

    def __init__(self, *args: Any, calls_aside: int) -> None:
        super().__init__(*args)
        self.calls_aside = calls_aside

    def forward(self, inputs: Any) -> Any:
        self.calls_aside -= torch.is_grad_enabled()
        return inputs if self.calls_aside >= 0 or not torch.is_grad_enabled() else super().forward(inputs)


class Logits(Head):
    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs[0] if isinstance(inputs, tuple) else inputs)


def packs_heads() -> bool:
    """Whether this version takes the query heads of one token as queries of fewer key heads where there is a mask."""
    return hasattr(sdpa_attention, "pack_gqa")


def decoders(family: str, kind: type[Decoder] = Decoder, **options: Any) -> list[LayerSpec]:
    """Four layers of a model family; ``options`` change its configuration."""
    layer, configuration, own = FAMILIES[family]
    return [LayerSpec(kind, layer, configuration(**SIZES | own | options), index) for index in range(4)]


def model(layers: list[LayerSpec], learned_positions: bool = False) -> list[LayerSpec]:
    """Embedding, layers and head."""
    return [LayerSpec(Tokens, learned_positions), *layers, LayerSpec(Logits)]


def steps_of(steps: int, micro_batches: int, mask: str | None = None) -> list[list[Any]]:
    """((tokens, mask) or tokens, targets) for each micro-batch; ``mask``: "padding", "window", or None for no mask at all."""
    return [[_micro_batch(100 * step + m, mask) for m in range(micro_batches)] for step in range(steps)]


def _micro_batch(seed: int, mask: str | None) -> tuple[Any, Tensor]:
    (tokens, positions), targets = micro_batch(seed, LENGTH, masked=False)
    if mask is None:
        return tokens, targets
    before = positions[:, :, None] - positions[:, None, :]
    visible = before >= 0
    if mask == "window":
        visible &= before < WINDOW
    else:  # the second sequence ends a few tokens earlier
        visible &= positions[:, None, :] < torch.tensor([LENGTH, LENGTH - 4 - seed % 3])[:, None, None]
    return (tokens, visible[:, None].contiguous()), targets
