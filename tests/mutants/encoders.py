"""Ways in which a BERT or a ViT can be another model than it says, or can learn something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.mutants.harness import Check, Hit, Mutant


def _attends_to_padding(original: Any, hit: Hit) -> Any:
    def forward(self: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hit()
        hidden, padding = inputs
        return original(self, (hidden, torch.ones_like(padding)))[0], padding

    return forward


def _has_one_type(original: Any, hit: Hit) -> Any:
    def embed(self: Any, tokens: Tensor, position_ids: Tensor, token_types: Tensor | None = None) -> Tensor:
        if token_types is not None:
            hit()
            token_types = torch.zeros_like(token_types)
        return original(self, tokens, position_ids, token_types)

    return embed


def _has_one_position(original: Any, hit: Hit) -> Any:
    def embed(self: Any, tokens: Tensor, position_ids: Tensor, token_types: Tensor | None = None) -> Tensor:
        hit()
        return original(self, tokens, torch.zeros_like(position_ids), token_types)

    return embed


def _turns_the_order(original: Any, hit: Hit) -> Any:
    def call(self: Any, outputs: Any, labels: Any) -> Tensor:
        hit()
        return original(self, outputs, (*labels[:2], 1 - labels[2]))

    return call


def _counts_all_tokens(original: Any, hit: Hit) -> Any:
    def token_weight(self: Any, labels: Any) -> Tensor:
        hit()
        return torch.tensor(float(labels[1].numel()))

    return token_weight


def _predicts_all_tokens(original: Any, hit: Hit) -> Any:
    def token_sum(self: Any, outputs: Tensor, labels: Any) -> Tensor:
        hit()
        return original(self, outputs, (labels[0], torch.ones_like(labels[1])))

    return token_sum


def _without_bias(original: Any, hit: Hit) -> Any:
    def forward(self: Any, inputs: Any) -> Any:
        hit()
        return inputs

    return forward


def _pools_the_last(original: Any, hit: Hit) -> Any:
    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hit()
        return original(self, hidden)[0], original(self, hidden.flip(0))[1]

    return forward


def _is_causal(original: Any, hit: Hit) -> Any:
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Tensor:
        hit()
        return self.attend(query, key, value, is_causal=True)

    return forward


def _has_no_places(original: Any, hit: Hit) -> Any:
    def forward(self: Any, images: Tensor) -> Tensor:
        hit()
        table = self.position_embeddings.weight
        hidden = original(self, images)
        return hidden - table[:, None] + table.mean(dim=0)

    return forward


PADDING = "padding is attended to"
TYPES = "all tokens are of one type"
POSITIONS = "all tokens are at one position"
ORDER = "the order of sentences is turned round"
WEIGHT = "the masked mean is over all tokens"
MASK = "tokens that are not masked are predicted too"
BIAS = "the vocabulary has no bias"
POOLED = "the last token is pooled"
CAUSAL = "bidirectional attention is causal"
PLACES = "all patches are at one place"

_BERT, _VIT = "encoders, BERT", "encoders, ViT"
_LAYERS, _LOSS = "ds_terapipe.megatron.bert_layers:", "ds_terapipe.megatron.loss:"
_EMBED = ("ds_terapipe.megatron.layers:Embedding.embed",)

MUTANTS = (
    Mutant(PADDING, "Padding is a token like others.", (_LAYERS + "BertLayer.forward",), _attends_to_padding, _BERT),
    Mutant(TYPES, "Both sentences have the first one's type.", _EMBED, _has_one_type, _BERT),
    Mutant(POSITIONS, "All tokens have the first one's position.", _EMBED, _has_one_position, _BERT),
    Mutant(ORDER, "Sentences that follow each other have the label of those that don't.",
           (_LOSS + "PretrainingLoss.__call__",), _turns_the_order, _BERT),
    Mutant(WEIGHT, "The loss of masked tokens is divided by the number of all.", (_LOSS + "TokenLoss.token_weight",),
           _counts_all_tokens, _BERT),
    Mutant(MASK, "The loss is that of all tokens.", (_LOSS + "TokenLoss.token_sum",), _predicts_all_tokens, _BERT),
    Mutant(BIAS, "Logits of the tied table have no bias.", (_LAYERS + "VocabularyBias.forward",), _without_bias, _BERT),
    Mutant(POOLED, "The order is told by the last token.", (_LAYERS + "PretrainingHead.forward",), _pools_the_last, _BERT),
    Mutant(CAUSAL, "Tokens and patches see those before them only.",
           ("ds_terapipe.megatron.attention:BidirectionalAttention.forward",), _is_causal, _VIT),
    Mutant(PLACES, "All patches have the mean of the positions.", ("ds_terapipe.megatron.vit_layers:Patches.forward",),
           _has_no_places, _VIT),
)  # fmt: skip

_ABOUT_BERT = tuple(mutant.name for mutant in MUTANTS if mutant.name != PLACES)

CHECKS = (
    Check(_BERT, "tests.megatron.encoder_training:off_by", ("bert",), _ABOUT_BERT, {PLACES: "has no patches"}),
    Check(
        _VIT,
        "tests.megatron.encoder_training:off_by",
        ("vit",),
        (CAUSAL, PLACES),
        {name: "has no text" for name in _ABOUT_BERT if name != CAUSAL},
    ),
)
