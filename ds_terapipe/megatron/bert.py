"""BERT as a DeepSpeed ``PipelineModule`` of megatron-core's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from megatron.core.transformer.transformer_config import TransformerConfig

from ds_terapipe.errors import bad_value
from ds_terapipe.megatron.bert_layers import (
    BertEmbedding,
    BertLayer,
    BertNorm,
    ClassificationHead,
    PretrainingHead,
    Vocabulary,
    VocabularyBias,
    tied_vocabulary,
)
from ds_terapipe.megatron.common import PositionEmbedding, check_config, core_config, layout_of, position_table
from ds_terapipe.megatron.layers import Rotary, with_vocabulary
from ds_terapipe.megatron.loss import PretrainingLoss, classification_loss
from ds_terapipe.staged_pipeline import StagedPipeline

Head = Literal["pretraining", "classification"]


class BertPipeline(StagedPipeline):
    """A BERT, which sees whole sequences: ``"slices": 1``.

    Layers: embedding, ``num_layers`` Transformer layers, final norm, and a head. Input: (tokens, token types, padding mask (1: a
    token)), each [b, s] int64. Between layers: ([s, b, hidden], padding [b, s] uint8).

    The head for pretraining is a transform and the order of the two sentences; the vocabulary; and, where the vocabulary is the
    embedding's table, its bias. Output: (logits [s, b, vocabulary / tensor parallel size], logits of the order [b, 2]). That
    for classification is one layer. Output: logits [b, classes].
    """

    layer_class = BertLayer


def bert_pipeline(
    config: TransformerConfig,
    *,
    vocab_size: int,
    seq_length: int,
    head: Head = "pretraining",
    classes: int = 2,
    token_types: int = 2,
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
) -> BertPipeline:
    """Build a BERT as a pipeline: the model of megatron-core's ``BertModel``. Every process calls it, after
    ``deepspeed.init_distributed``.

    The weights are those of ``seed``, whatever the layout, as those of :func:`~ds_terapipe.megatron.gpt_pipeline`. What is not
    described here is as there.

    Args:
        config: megatron-core's description of the layers.
        vocab_size: padded size of the vocabulary, a multiple of the tensor parallel size.
        seq_length: longest sequence in tokens.
        head: ``"pretraining"``, of masked tokens and of the order of two sentences, or ``"classification"`` of samples.
        classes: of the latter.
        token_types: rows of the table of token types; 0: there is none.
        num_stages: pipeline stages; or
        topology: the layout.
        position_embedding: ``"learned"`` or ``"rope"``, both counted from 0.
        tied: whether the vocabulary's logits are made by the word embedding.
        max_position_embeddings: size of the learned position table, default ``seq_length``.
        rotary_percent, rotary_base: part of the head dimension that is rotated, and base of the frequencies.
        layers_per_stage: Transformer layers of each stage, default even, earlier stages first.
        seed: of the initial weights.
        loss_fn: default :class:`PretrainingLoss`, of (labels, loss mask, order), or for classes the mean cross entropy.
        pipeline: further arguments of ``PipelineModule``.

    Raises:
        ConfigError: a size that does not divide, a stage without a layer, no such head, or a setting that is not followed.
    """
    if head not in ("pretraining", "classification"):
        raise bad_value("head", head, '"pretraining" or "classification"', '"pretraining"')
    if classes < 2:
        raise bad_value("classes", classes, "at least 2", "2")
    topology = layout_of(config, num_stages, topology)
    check_config(config, topology, vocab_size=vocab_size)
    positions = position_table(position_embedding, max_position_embeddings, seq_length)
    rotary = Rotary(rotary_percent, rotary_base) if positions is None else None
    config = core_config(config)
    embedding = (config, vocab_size, positions, seed, token_types)
    last = config.num_layers + 1
    body = [LayerSpec(BertLayer, config, number, rotary, seed + number) for number in range(1, last)]
    body.append(LayerSpec(BertNorm, config))
    if head == "classification":
        specs = [
            LayerSpec(BertEmbedding, *embedding),
            *body,
            LayerSpec(ClassificationHead, config, classes, seed + last),
        ]
        loss_fn = loss_fn or classification_loss
    else:
        body.append(LayerSpec(PretrainingHead, config, seed + last))
        own = None if tied else LayerSpec(Vocabulary, config, vocab_size, seed + last + 1)
        specs = with_vocabulary(BertEmbedding, embedding, body, tied_vocabulary, own)
        specs += [LayerSpec(VocabularyBias, config, vocab_size)] if tied else []
        loss_fn = loss_fn or PretrainingLoss()
    return BertPipeline(specs, layers_per_stage, topology, loss_fn=loss_fn, **pipeline)
