"""The script of a check that is given sizes of a model; arguments: model, stages, tensor parallel size, tokens."""

from __future__ import annotations

import sys

import deepspeed
from torch.nn import functional as F

from ds_terapipe.plan.costs.hardware import load_model

VOCABULARY = 51200  # rows of a table where the sizes name none: GPT-3's, padded


def main(name: str, stages: int, tensor: int, tokens: int) -> None:
    """Build the model and its engine; the configuration is that of the check."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ds_terapipe.megatron import gpt_pipeline

    sizes = load_model(name)
    activation = {"activation_func": F.silu, "gated_linear_unit": True} if sizes.swiglu else {}
    config = TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_query_groups or None,
        ffn_hidden_size=sizes.ffn_hidden_size or None,
        kv_channels=sizes.kv_channels or None,
        tensor_model_parallel_size=tensor,
        **activation,
    )
    deepspeed.init_distributed()
    rows = -(-(sizes.vocab_size or VOCABULARY) // tensor) * tensor
    tied = not sizes.untie_embeddings_and_output_weights
    model = gpt_pipeline(config, vocab_size=rows, seq_length=tokens, num_stages=stages, tied=tied)
    deepspeed.initialize(model=model, model_parameters=list(model.parameters()))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
