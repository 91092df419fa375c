"""Layers of transformers in a PipelineModule train in slices, of one token too, as they do whole, or are refused by name.

They are written as a user writes them: a wrapper around each, which knows positions from ``current_span`` and no more of slices.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed, extra hf")

from transformers import BertConfig, LlamaConfig
from transformers.integrations import sdpa_attention
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ds_terapipe import current_span
from ds_terapipe.errors import ConfigError
from tests.pipeline.models import HEADS, HIDDEN, POSITIONS, VOCABULARY, Head, mean_loss, micro_batch
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

LENGTH, STEPS, MICRO_BATCHES = 24, 2, 2
ONES = [1, 8, 1, 13, 1]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 4, "max_position_embeddings": POSITIONS,
}  # fmt: skip


class Tokens(nn.Module):
    """Token ids [b, s], or with them a mask [b, 1, s, context + s], to hidden states [b, s, hidden] and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, inputs: Any) -> Any:
        return (self.tokens(inputs[0]), inputs[1]) if isinstance(inputs, tuple) else self.tokens(inputs)


class Decoder(nn.Module):
    """A layer of Hugging Face's: hidden states [b, s, hidden], or with them a mask that it hands on."""

    def __init__(self, layer: type[nn.Module], config: Any, index: int) -> None:
        super().__init__()
        self.layer = layer(config, layer_idx=index)
        self.rotary = LlamaRotaryEmbedding(config) if layer is LlamaDecoderLayer else None

    def forward(self, inputs: Any) -> Any:
        hidden, *mask = inputs if isinstance(inputs, tuple) else (inputs,)
        given: dict[str, Any] = {"attention_mask": mask[0] if mask else None}
        if self.rotary is not None:
            span = current_span()
            positions = torch.arange(hidden.shape[1])[None] + (0 if span is None else span.start)
            given.update(position_ids=positions, position_embeddings=self.rotary(hidden, positions))
        outputs = self.layer(hidden, **given)
        hidden = outputs[0] if isinstance(outputs, tuple) else outputs  # a tuple from some layers of older versions
        return (hidden, *mask) if mask else hidden


class Logits(Head):
    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs[0] if isinstance(inputs, tuple) else inputs)


def llama(key_heads: int = 2) -> list[LayerSpec]:
    config = LlamaConfig(**SIZES, attn_implementation="sdpa", num_key_value_heads=key_heads)
    return [LayerSpec(Decoder, LlamaDecoderLayer, config, index) for index in range(4)]


def bert(index: int) -> LayerSpec:
    config = BertConfig(**SIZES, attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return LayerSpec(Decoder, BertLayer, config, index)


def model(layers: list[LayerSpec]) -> list[LayerSpec]:
    return [LayerSpec(Tokens), *layers, LayerSpec(Logits)]


def data(padded: bool) -> list[list[Any]]:
    """((tokens, mask) or tokens, targets) for each micro-batch; ``padded``: the second sequence ends a few tokens earlier."""

    def one(seed: int) -> tuple[Any, Tensor]:
        (tokens, _), targets = micro_batch(seed, LENGTH, masked=False)
        ends = torch.tensor([LENGTH, LENGTH - 4 - seed % 3])[:, None, None, None]
        visible = torch.ones(LENGTH, LENGTH).tril().bool() & (torch.arange(LENGTH) < ends)
        return ((tokens, visible) if padded else tokens), targets

    return [[one(100 * step + m) for m in range(MICRO_BATCHES)] for step in range(STEPS)]


# slices, whether a mask travels along, key heads
CASES: dict[str, tuple[Any, bool, int]] = {
    "every token": ([1] * LENGTH, False, 2),
    "padding": (ONES, True, HEADS),
    "padding, fewer key heads": (4, True, 2),
}
# layers, whether a mask travels along, what the first batch says; without "verify" the rules of attention stand alone
REFUSED: dict[str, tuple[list[Any], bool, str]] = {
    "bert among others": (
        [*llama()[:2], bert(2), *llama()[3:]], False,
        r"can't be cut: attention that is not causal \(layer 3 \(\w+\), micro-batch 0, tokens 0 to 2\)",
    ),
    "fewer key heads, a mask, and one token": (
        llama(), True,
        r"4 query heads of one token as 2 queries of 2 key heads \(layer 1 \(\w+\), |^trained, as the keys are repeated$",
    ),
}  # fmt: skip


def trained(slices: Any, padded: bool, key_heads: int) -> float:
    """The largest difference from one process."""
    specs, steps = model(llama(key_heads)), data(padded)
    plain = train_plain(specs, mean_loss, steps, partial(torch.optim.SGD, lr=0.2))
    engine = build_engine(specs, mean_loss, token_pipeline={"slices": slices}, micro_batches=MICRO_BATCHES)
    got = train(engine, steps)
    engine.destroy()
    assert all(step and step.keys() == got.weights.keys() for step in got.gradients), "parameters without a gradient"
    pairs = [*zip(got.gradients, plain.gradients, strict=True), (got.weights, plain.weights)]
    return max(
        *(worst(*pair) for pair in pairs), *(abs(a / b - 1) for a, b in zip(got.losses, plain.losses, strict=True))
    )


def refused() -> dict[str, str]:
    said = {}
    for name, (layers, padded, _) in REFUSED.items():
        engine = build_engine(model(layers), mean_loss, token_pipeline={"slices": ONES, "verify": padded})
        try:
            train(engine, data(padded))
            said[name] = "trained" if hasattr(sdpa_attention, "pack_gqa") else "trained, as the keys are repeated"
        except ConfigError as error:
            said[name] = str(error)
        engine.destroy()
    return said


def worker(rank: int, world_size: int) -> Any:
    return {name: trained(*case) for name, case in CASES.items()}, refused()


ranks = launched(worker, 2, timeout=240, env={"HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("name", CASES)
def test_layers_train_in_slices_as_they_do_whole(ranks: list[Any], name: str) -> None:
    assert max(found[name] for found, _ in ranks) <= 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrongly_is_refused(ranks: list[Any], name: str) -> None:
    for _, said in ranks:
        assert re.search(REFUSED[name][-1], said[name]), said[name]
