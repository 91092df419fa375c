"""The Llama of the token pipeline benchmark: Hugging Face's own layers, by ``ds_terapipe.hf``, under every engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.benchmarks.gpt import Shape

KV_HEADS = 2
_SEED = 7


def _config(shape: Shape) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=8 * shape.hidden // 3 // 16 * 16,
        num_attention_heads=shape.heads,
        num_key_value_heads=KV_HEADS,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.sequence,
    )


def pipeline(shape: Shape, stages: int) -> Any:
    """A ``PipelineModule`` with equally many layers on each stage."""
    from ds_terapipe import hf

    each = shape.layers // stages
    return hf.pipeline(
        _config(shape), num_stages=stages, layers_per_stage=[each] * stages, seed=_SEED, dynamic_shape=False
    )


class Whole(nn.Module):
    """transformers' own model with the pipeline's weights, and its own attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        from ds_terapipe.hf.source import source_of

        source = source_of(_config(shape), None, _SEED)
        self.model = AutoModelForCausalLM.from_config(_config(shape))
        base, parts = self.model, source.parts
        layers = [f"{parts.layers}.{index}" for index in range(shape.layers)]
        for part in (parts.tokens, *layers, parts.norm, parts.head):
            base.get_submodule(part).load_state_dict(source.take(part).state_dict())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def loss() -> Any:
    """Of logits and the tokens' own labels."""
    from ds_terapipe.hf import CausalLMLoss

    return CausalLMLoss()


def batch(shape: Shape, sequences: int) -> tuple[Tensor, Tensor]:
    """Random tokens [sequences, sequence], which are their own labels."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(shape.vocabulary, (sequences, shape.sequence), generator=generator)
    return tokens, tokens
