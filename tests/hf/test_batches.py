"""Batches of a collator: tensors between stages, visible tokens; and a model that was handed over goes on as before."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from transformers import ApertusConfig, DataCollatorWithFlattening, LlamaConfig
from transformers.masking_utils import create_causal_mask

from ds_terapipe import hf
from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.batches import _say_that_documents_are_one
from ds_terapipe.hf.decoder_pipeline import balanced
from ds_terapipe.hf.positions import documents_of
from ds_terapipe.hf.source import source_of
from ds_terapipe.pipeline.slicing import spans
from tests.hf import families
from tests.pipeline.attention_layers import seen_by


@st.composite
def batches(draw: Any) -> dict[str, Tensor]:
    """Batches with padding anywhere, documents of any lengths, or neither; labels that count, or not, anywhere."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(2, 9))
    tokens = torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    made = {"input_ids": tokens, "labels": tokens.clone()}
    bits = st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)
    made["labels"][torch.tensor(draw(bits)).view(rows, length)] = -100
    kind = draw(st.sampled_from(["plain", "mask", "behind", "documents", "documents, masked", "positions"]))
    if kind == "mask":
        made["attention_mask"] = torch.tensor(draw(bits)).view(rows, length).long()
    elif kind == "behind":
        real = torch.tensor(draw(st.lists(st.integers(1, length), min_size=rows, max_size=rows)))
        made["attention_mask"] = (torch.arange(length) < real[:, None]).long()
    elif kind.startswith("documents"):
        begins = torch.tensor(draw(bits)).view(rows, length)
        begins[:, 0] = True
        index = torch.arange(length).expand(rows, -1)
        made["position_ids"] = index - index.where(begins, 0).cummax(1).values
        if kind == "documents, masked":
            made["attention_mask"] = torch.ones_like(tokens)
    elif kind == "positions":
        made["position_ids"] = torch.arange(length)[None] + draw(st.integers(0, 3))
    return made


def visible(made: dict[str, Tensor]) -> Tensor:
    """Mask of transformers for ``sdpa``, [b, S, S]; True: may attend."""
    tokens, config = made["input_ids"], LlamaConfig(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    given = {name: made.get(name) for name in ("attention_mask", "position_ids")}
    mask = create_causal_mask(config, torch.zeros(*tokens.shape, 4), past_key_values=None, **given)
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    return causal.expand(len(tokens), -1, -1) if mask is None else mask[:, 0].expand(len(tokens), -1, -1)


PADDED = {"input_ids": torch.ones(1, 2).long(), "labels": torch.ones(1, 2).long(), "attention_mask": torch.zeros(1, 2)}


@settings(deadline=None, max_examples=150)
@given(batches())
@example(PADDED)  # its labels count
def test_tokens_see_what_transformers_lets_them_see(made: dict[str, Tensor]) -> None:
    inputs, labels = hf.batch(made)
    tokens, expected = made["input_ids"], visible(made)
    length, plain = tokens.shape[1], torch.arange(tokens.shape[1]).expand_as(tokens)
    assert labels is made["labels"]
    counts = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) != -100
    documents, real = documents_of(inputs), made.get("attention_mask", torch.ones_like(tokens)) != 0
    assert isinstance(inputs, Tensor) or (inputs[0] is tokens and inputs[1].shape == (len(tokens), 1, 2 * length))
    positions, seen = plain, torch.ones_like(expected).tril()
    if documents is not None:
        positions, seen = documents.positions(tokens.device), seen_by(documents, spans((1, length - 1)))
        assert not counts[:, documents.used :].any() and not real[:, documents.used :].any()
    asked = real | counts  # of other tokens nothing is asked
    assert torch.equal(seen[asked], expected[asked])
    assert torch.equal(positions, made.get("position_ids", plain).expand_as(tokens))


ONES = torch.ones(2, 4, dtype=torch.long)
GOOD = {"input_ids": ONES.clone(), "labels": ONES.clone()}
# a key, its value, and what is said
BAD: dict[str, tuple[str, Any, str]] = {
    "no labels": ("labels", None, "got none for labels, must be a tensor"),
    "another length": ("labels", torch.ones(2, 5), r"got labels of shape \[2, 5\], must be that of input_ids, use \[2, 4\]"),
    "numbers of documents": ("attention_mask", torch.tensor([[1, 1, 2, 2], [1, 1, 1, 1]]),
        "got 2 in attention_mask, must be 1, or 0 for padding, use position_ids that restart with each document, without"),
    "a list": ("attention_mask", [[1, 1, 1, 1]] * 2, "got list"),
    "images": ("pixel_values", torch.ones(2, 3), "got pixel_values, must be among input_ids"),
    "types": ("token_type_ids", torch.ones(2, 4), "got token_type_ids other than 0"),
}  # fmt: skip


@pytest.mark.parametrize(("key", "value", "said"), BAD.values(), ids=BAD)
def test_what_is_no_batch_is_said(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"hf.batch: {said}"):
        hf.batch({**GOOD, key: value})


def test_documents_beside_a_mask_of_ones_are_one_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_that_documents_are_one.cache_clear()
    packed = torch.tensor([[0, 1, 0, 1]] * 2)
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1]] * 2), "position_ids": torch.tensor([[1, 1, 0, 1]] * 2)}
    for kept in ({"position_ids": packed}, padded, {"attention_mask": ONES, "position_ids": torch.arange(4)[None]}):
        hf.batch({**GOOD, **kept})
    assert not caplog.records
    for _ in range(2):
        inputs, _ = hf.batch({**GOOD, "attention_mask": ONES.bool(), "position_ids": packed})
        assert torch.equal(inputs[1].chunk(2, dim=-1)[1], ONES[:, None])
    assert len(caplog.records) == 1 and "all tokens of a row are one document, as for transformers" in caplog.text
    inputs, _ = hf.batch({**GOOD, "token_type_ids": torch.zeros(2, 4), "attention_mask": ONES})
    assert inputs is GOOD["input_ids"], "types of zeros are left out"
    flattened = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    inputs, labels = hf.batch(flattened([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]))
    assert documents_of(inputs).runs[0].tolist() == [[0, 3], [0, 0], [1, 2]] and labels.tolist() == [[-100, 6, 7, -100, 9]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_model_that_was_handed_over_evaluates_and_generates_as_before(family: str) -> None:
    """Padded in front, with a cache, one token after the other: windows and soft caps among them."""
    model = families.model_of(family).eval()
    other = source_of(copy.deepcopy(model), None, 0).model
    assert other.config._attn_implementation == "ds_terapipe"
    made = families.features("front", 3)
    given = {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}
    real = made["attention_mask"] > 0
    a, b = (one(**given).logits[real] for one in (model, other))
    assert torch.allclose(a, b, atol=1e-5)
    said = [one.generate(**given, max_new_tokens=8, do_sample=False, pad_token_id=0) for one in (model, other)]
    assert torch.equal(*said)


def test_new_weights_are_the_same_whatever_is_taken_first() -> None:
    config = families.config_of("gemma3")
    one, other, seeded = (source_of(config, None, seed) for seed in (5, 5, 6))
    part = f"{one.parts.layers}.1"
    other.take(one.parts.tokens)
    first, second, third = (source.take(part) for source in (one, other, seeded))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert not torch.equal(first.mlp.up_proj.weight, third.mlp.up_proj.weight)
    assert float(first.mlp.up_proj.weight.detach().std()) == pytest.approx(config.initializer_range, rel=0.2)
    assert torch.equal(one.take(one.parts.tokens).embed_scale, torch.tensor(config.hidden_size**0.5))
    block = source_of(families.config_of("gpt2"), None, 5).take("transformer.h.0")  # begins smaller, as in GPT-2's paper
    assert float(block.mlp.c_proj.weight.detach().std()) == pytest.approx(config.initializer_range / 8**0.5, rel=0.2)
    with pytest.raises(ConfigError, match=r"got apertus, for whose .*act_fn.alpha_p _init_weights has no value"):
        source_of(ApertusConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1), None, 5).take("model.layers.0")


def test_a_head_counts_where_layers_are_shared_out() -> None:
    small = source_of(families.config_of("llama", num_hidden_layers=8), None, 0)
    large = source_of(families.config_of("llama", num_hidden_layers=8, vocab_size=900), None, 0)
    assert balanced(small, 2) == [4, 4] and balanced(small, 1) == [8]
    assert balanced(source_of(families.config_of("llama", num_hidden_layers=1), None, 0), 2) == []
    ratio = large.numel("lm_head") / large.numel("model.layers.0")
    assert 3 < ratio < 5 and balanced(large, 2) == [6, 2] and balanced(large, 4) == [3, 2, 2, 1]
