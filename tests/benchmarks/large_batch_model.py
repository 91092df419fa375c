"""The model of the large-batch benchmark: Megatron-core's BERT, masked language modelling, on one CPU process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ds_terapipe.megatron.attention import rotary_embedding
from tests.benchmarks.large_batch_corpus import SEQUENCE, VOCABULARY, Batch
from tests.spawn import free_port

# A feed-forward layer of twice the width, where BERT has four times, saves a quarter of the time.
LAYERS, HIDDEN, HEADS, FEED_FORWARD = 2, 128, 2, 256


class BidirectionalAttention(nn.Module):
    """Megatron-core's ``core_attention`` without a mask; its own asks for a buffer on a CUDA device."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **unused: Any) -> Tensor:
        """[s, b, heads, d] each, to [s, b, heads * d]."""
        heads = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        return F.scaled_dot_product_attention(*heads).permute(2, 0, 1, 3).flatten(2)


def start_single_process() -> None:
    """Megatron-core's process groups with this process alone in them. Doing it twice does nothing."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def make_model(seed: int) -> BertModel:
    """A BERT of 2 layers x 128 with weights from ``seed``, embeddings and output weights shared, without dropout.

    Rotary positions: with learned ones the 200 steps at batch 512 are over before the model has found out which bytes
    are neighbours, and every optimizer ends at the loss of the bytes' frequencies.
    """
    start_single_process()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=FEED_FORWARD,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            init_method_std=(2 / (5 * HIDDEN)) ** 0.5,  # 0.02 at the width of BERT-large
            use_cpu_initialization=True,
        )
        model = BertModel(
            config,
            num_tokentypes=0,
            transformer_layer_spec=bert_layer_local_spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=True,
            add_binary_head=False,
            position_embedding_type="rope",
        )
    for layer in model.encoder.layers:  # after the constructor, which knows no other core_attention in a local spec
        layer.self_attention.core_attention = BidirectionalAttention()
    return model


def masked_loss(model: BertModel, batch: Batch) -> Tensor:
    """Mean cross entropy, in nats, over the masked positions of ``batch``.

    The same modules in the same order as ``BertModel.forward``, but the head sees the masked positions only, which are
    a sixth of all. Every position holds a token, so there is no padding mask.
    """
    angles = rotary_embedding(model.rotary_pos_emb, 0, SEQUENCE, batch.tokens.device)
    hidden = model.embedding(input_ids=batch.tokens, position_ids=model.bert_position_ids(batch.tokens))
    hidden = model.encoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
    masked = hidden.transpose(0, 1).flatten(0, 1)[batch.positions]
    weight = model.shared_embedding_or_output_weight()
    logits, _ = model.output_layer(model.lm_head(masked).unsqueeze(1), weight=weight)
    return F.cross_entropy(logits.squeeze(1), batch.labels)
