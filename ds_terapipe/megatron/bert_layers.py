"""The layers of a BERT pipeline that others have not: embedding with token types, layers with a padding mask, heads.

They compute what megatron-core's ``BertModel`` (models/bert, 0.16.1) computes. Padding travels beside the hidden states, as
uint8: DeepSpeed's own engine sends no bool over NCCL.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from ds_terapipe.megatron.attention import BidirectionalAttention, Norm
from ds_terapipe.megatron.layers import (
    CoreLayer,
    Embedding,
    FinalNorm,
    Rotary,
    output_layer,
    random_stream,
    tied_logits,
    without_kernels,
)
from ds_terapipe.megatron.parallel import process_groups
from ds_terapipe.pipeline.operators.interception import defers

Padded = tuple[Tensor, Tensor]  # hidden states [s, b, hidden]; [b, s] uint8, 1 for a token, 0 for padding
Logits = tuple[Tensor, Tensor]  # of the tokens [s, b, ...], of the order of two sentences [b, 2]


def encoder_spec(config: TransformerConfig, mask: AttnMaskType) -> ModuleSpec:
    """Return megatron-core's local BERT layer, without causality, with the modules replaced that need CUDA."""
    spec = copy.deepcopy(bert_layer_local_spec)
    spec.submodules.self_attention.params["attn_mask_type"] = mask
    return without_kernels(spec, config, BidirectionalAttention)


class BertEmbedding(Embedding):
    """Words, learned positions (counted from 0) and token types."""

    def forward(self, inputs: Any) -> Any:
        """(tokens, token types, padding mask (1: a token)), each [b, s] int64, to hidden states and padding."""
        tokens, token_types, padding = inputs
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.embed(tokens, positions, token_types), (padding > 0).to(torch.uint8)


class BertLayer(CoreLayer):
    """A Transformer layer in which every token sees all tokens that are no padding."""

    def __init__(self, config: TransformerConfig, number: int, rotary: Rotary | None, seed: int) -> None:
        super().__init__(config, encoder_spec(config, AttnMaskType.padding), number, rotary, seed)

    def forward(self, inputs: Padded) -> Padded:
        hidden, padding = inputs
        return self.run(hidden, (padding == 0)[:, None, None, :]), padding


class BertNorm(FinalNorm):
    """The norm after the last layer; later layers do not need the padding."""

    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs[0])


def linear(config: TransformerConfig, outputs: int) -> nn.Linear:
    """A linear layer of the hidden states that every tensor parallel rank has whole; its bias starts at zero."""
    made = nn.Linear(config.hidden_size, outputs, dtype=config.params_dtype)
    if config.perform_initialization:
        config.init_method(made.weight)
        nn.init.zeros_(made.bias)
    return made


class PretrainingHead(nn.Module):
    """Transform before the vocabulary, and the classifier of the sentence order, by the first token."""

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        super().__init__()
        with random_stream(seed):
            self.dense = linear(config, config.hidden_size)
            self.pooler = linear(config, config.hidden_size)
            self.order = linear(config, 2)
        self.norm = Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> Logits:
        """[s, b, hidden] to (the same, logits of the order [b, 2])."""
        return self.norm(F.gelu(self.dense(hidden))), self.order(torch.tanh(self.pooler(hidden[0])))


class Vocabulary(nn.Module):
    """The logits by a table of their own, with a bias: (hidden [s, b, hidden], order) to (this process's logits, order)."""

    def __init__(self, config: TransformerConfig, vocab_size: int, seed: int) -> None:
        super().__init__()
        self.output_layer = output_layer(config, vocab_size, seed, config.init_method, bias=True)

    def forward(self, inputs: Logits) -> Logits:
        return self.output_layer(inputs[0])[0], inputs[1]


@defers
def tied_vocabulary(embedding: Embedding, inputs: Logits) -> Logits:
    """Compute the logits of :class:`Vocabulary` from the embedding's table, without the bias."""
    return tied_logits(embedding, inputs[0]), inputs[1]


class VocabularyBias(nn.Module):
    """The bias of logits that :func:`tied_vocabulary` makes, shared among the tensor parallel ranks as they are."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        size = vocab_size // process_groups().tp.size()
        self.bias = nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, inputs: Logits) -> Logits:
        return inputs[0] + self.bias, inputs[1]


class ClassificationHead(nn.Module):
    """Classes of a sample, by its first token: [s, b, hidden] to [b, classes]."""

    def __init__(self, config: TransformerConfig, classes: int, seed: int) -> None:
        super().__init__()
        with random_stream(seed):
            self.pooler = linear(config, config.hidden_size)
            self.classifier = linear(config, classes)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.dropout(torch.tanh(self.pooler(hidden[0])))))
