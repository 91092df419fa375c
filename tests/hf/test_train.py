"""Hugging Face's layers in a PipelineModule train in slices, of one token too, as they do whole, or are refused by name.

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

from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig, PreTrainedConfig
from transformers.integrations import sdpa_attention
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

from ds_terapipe import current_span
from ds_terapipe.errors import ConfigError
from tests.pipeline.models import HEADS, HIDDEN, POSITIONS, VOCABULARY, Head, mean_loss, micro_batch
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

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

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)

    def forward(self, inputs: Any) -> Any:
        tokens, *mask = inputs if isinstance(inputs, tuple) else (inputs,)
        hidden = self.tokens(tokens) + self.positions(positions_of(tokens))
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


def decoders(family: str, kind: type[Decoder] = Decoder, **options: Any) -> list[LayerSpec]:
    """Four layers of a model family; ``options`` change its configuration."""
    layer, configuration, own = FAMILIES[family]
    return [LayerSpec(kind, layer, configuration(**SIZES | own | options), index) for index in range(4)]


def model(layers: list[LayerSpec]) -> list[LayerSpec]:
    """Embedding, layers and head."""
    return [LayerSpec(Tokens), *layers, LayerSpec(Logits)]


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


STEPS, MICRO_BATCHES = 2, 2
ONES, EVERY = [1, 8, 1, 13, 1], [1] * 24
# a reentrant checkpoint of the embedding would cut it off: its inputs are whole numbers
LAYERS = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Decoder", "Logits"]}
REENTRANT = {"config": {"pipeline": {"use_reentrant": True}}, "module": LAYERS}
NOT_REENTRANT = {"config": {"pipeline": {"use_reentrant": False}}, "module": {"activation_checkpoint_interval": 2}}
# family, slices, options of the engine, the mask that travels along, options of the model
CASES: dict[str, tuple[str, Any, dict[str, Any], str | None, dict[str, Any]]] = {
    "every token": ("llama", EVERY, {}, None, {}),
    "llama, recomputed": ("llama", ONES, REENTRANT, None, {}),
    "gpt2, recomputed": ("gpt2", ONES, NOT_REENTRANT, None, {}),
    "padding": ("llama", ONES, {}, "padding", {"num_key_value_heads": 4}),
    "padding, fewer key heads": ("llama", 4, {}, "padding", {}),
    "a sliding window": ("mistral", 4, {}, "window", {}),
}
NOT_CAUSAL = r"can't be cut: attention that is not causal \(layer {} \(\w+\), micro-batch 0, tokens 0 to {}\)"
LLAMA, BERT, PACKED = decoders("llama"), decoders("bert"), "fewer key heads, a mask, and one token"
# it was not there to be looked at, and a slice of one token is all that is seen of it; on two replicas of one stage
LATER = LayerSpec(Later, *BERT[1].module_args, calls_aside=MICRO_BATCHES * 24)
EAGER = decoders("llama", attn_implementation="eager")
STILL, MORE, PADDED = steps_of(1, MICRO_BATCHES), steps_of(2, 2 * MICRO_BATCHES), steps_of(1, MICRO_BATCHES, "padding")
# layers, slices, data, "verify" (without it the rules of attention stand alone), stages, what the first batch says
REFUSED: dict[str, tuple[list[Any], list[int], Any, bool, int, str]] = {
    "bert among others": ([*LLAMA[:2], BERT[2], LLAMA[3]], ONES, STILL, False, 2, NOT_CAUSAL.format(3, 2)),
    "bert that comes later": ([LLAMA[0], LATER, *LLAMA[2:]], EVERY, MORE, False, 1, NOT_CAUSAL.format(2, 1)),
    "llama, not causal": (
        [LLAMA[0], *decoders("llama", NotCausal)[1:]], ONES, STILL, False, 2, NOT_CAUSAL.format(2, 2)
    ),
    "eager": (EAGER, ONES, STILL, True, 2, r"module \d\.layer\.self_attn\.o_proj, differs by .* between slice and whole seq"),
    PACKED: (
        LLAMA, ONES, PADDED, True, 2,
        r"4 query heads of one token as 2 queries of 2 key heads \(layer 1 \(\w+\), |^trained, as the keys are repeated$",
    ),
}  # fmt: skip


def trained(family: str, slices: Any, options: Any, mask: str | None, changes: Any) -> float:
    """The largest difference from one process."""
    specs = model(decoders(family, **changes))
    steps = steps_of(STEPS, MICRO_BATCHES, mask)
    plain = train_plain(specs, mean_loss, steps, partial(torch.optim.SGD, lr=0.2))
    engine = build_engine(specs, mean_loss, token_pipeline={"slices": slices}, micro_batches=MICRO_BATCHES, **options)
    got = train(engine, steps)
    engine.destroy()
    assert all(step and step.keys() == got.weights.keys() for step in got.gradients), "parameters without a gradient"
    differences = [abs(a / b - 1) for a, b in zip(got.losses, plain.losses, strict=True)]
    differences += [worst(a, b) for a, b in zip(got.gradients, plain.gradients, strict=True)]
    return max(*differences, worst(got.weights, plain.weights))


def refused() -> dict[str, str]:
    said = {}
    for name, (layers, lengths, steps, verify, stages, _) in REFUSED.items():
        keys = {"slices": lengths, "verify": verify}
        engine = build_engine(model(layers), mean_loss, token_pipeline=keys, stages=stages)
        try:
            train(engine, steps)
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
    assert [found[name] <= 1e-5 for found, _ in ranks] == [True, True], [found[name] for found, _ in ranks]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrongly_is_refused(ranks: list[Any], name: str) -> None:
    for _, said in ranks:
        assert re.search(REFUSED[name][-1], said[name]), said[name]
