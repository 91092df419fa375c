"""Which models a pipeline takes: each kind is compared with itself before weights are read, and what differs is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed, extra hf")

import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.check import check_chain
from ds_terapipe.hf.decoder_pipeline import _built, _specs
from ds_terapipe.hf.source import source_of

TWO = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
SIZES = TWO | {
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
# docs/huggingface.md's list, by the name of the configuration's class
PASS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("GemmaConfig", "HeliumConfig"), SIZES | {"head_dim": 8}),
    **dict.fromkeys(
        ("StableLmConfig", "Starcoder2Config", "SmolLM3Config", "PhiConfig", "Olmo3Config", "NemotronConfig"), SIZES
    ),
}  # fmt: skip
DIFFERS = "whose own forward does more than its layers do"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GraniteConfig": (SIZES | {"logits_scaling": 4.0}, DIFFERS),
    "CohereConfig": (SIZES | {"logit_scale": 0.1}, DIFFERS),
    "Cohere2Config": (SIZES, DIFFERS),
    "Gemma3nTextConfig": ({}, "with Gemma3nRMSNorm and"),
    "OPTConfig": (TWO | {"ffn_dim": 48}, "without a list of layers"),
    "MixtralConfig": (SIZES, "mixture"),
    "FalconConfig": (TWO, "AttentionInterface"),
    "GPTJConfig": ({"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4}, "AttentionInterface"),
    "BloomConfig": ({"hidden_size": 32, "n_head": 4, "n_layer": 2}, "AttentionInterface"),
    "BertConfig": (TWO, "with BertEmbeddings and BertEncoder"),
}


def check(model: Any) -> None:
    """What :func:`ds_terapipe.hf.pipeline` does before it reads weights."""
    source = source_of(model, torch.float64, 0)
    check_chain(source, lambda tiny: [_built(spec) for spec in _specs(tiny)])


@pytest.mark.parametrize("name", [*PASS, *REFUSED])
def test_a_model_that_is_its_layers_passes_and_another_is_refused_with_what(name: str) -> None:
    if name in PASS:
        check(getattr(transformers, name)(**PASS[name]))
        return
    sizes, said = REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        check(getattr(transformers, name)(**sizes))
    assert said in str(refused.value) and "\n" not in str(refused.value), str(refused.value)


def test_a_forward_of_the_users_own_and_kernels_that_know_no_slices_are_refused() -> None:
    class Cooler(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits / 2
            return out

    config = LlamaConfig(**SIZES)
    check(LlamaForCausalLM(config))
    with pytest.raises(ConfigError, match=f"{DIFFERS}.*logits differs by"):
        check(Cooler(config))
    for kernels in ("flash_attention_2", "flex_attention"):
        config._attn_implementation = kernels
        with pytest.raises(ConfigError, match=kernels):
            check(config)
