"""Hugging Face's layers in a PipelineModule train in slices, of one token too, as they do whole, or are refused by name."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from ds_terapipe.errors import ConfigError
from tests.pipeline.models import mean_loss
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed, extra hf")

STEPS, MICRO_BATCHES = 2, 2
EQUAL, ONES, EVERY = [6, 6, 6, 6], [1, 8, 1, 13, 1], [1] * 24
REENTRANT = {
    "config": {"pipeline": {"use_reentrant": True}},
    # a reentrant checkpoint of the embedding would cut it off: its inputs are whole numbers
    "module": {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Decoder", "Logits"]},
}
NOT_REENTRANT = {
    "config": {"pipeline": {"use_reentrant": False}},
    "module": {"activation_checkpoint_interval": 2, "checkpointable_layers": None},
}
# family, slices, options of the engine, the mask that travels along, options of the model
CASES: dict[str, tuple[str, list[int], dict[str, Any], str | None, dict[str, Any]]] = {
    "llama": ("llama", EQUAL, {}, None, {}),
    "llama, slices of one token": ("llama", ONES, {}, None, {}),
    "llama, every token": ("llama", EVERY, {}, None, {}),
    "gpt2, slices of one token": ("gpt2", ONES, {}, None, {}),
    "llama, recomputed": ("llama", ONES, REENTRANT, None, {}),
    "gpt2, recomputed": ("gpt2", ONES, NOT_REENTRANT, None, {}),
    "padding": ("llama", ONES, {}, "padding", {"num_key_value_heads": 4}),
    "padding, fewer key heads": ("llama", EQUAL, {}, "padding", {}),
    "a sliding window": ("mistral", EQUAL, {}, "window", {}),
}
NOT_CAUSAL = r"can't be cut: attention that is not causal \(layer {} \(\w+\), micro-batch 0, tokens 0 to {}\)"
PACKED = "fewer key heads, a mask, and one token"
REFUSED: dict[str, str] = {
    "bert": NOT_CAUSAL.format(1, 2),
    "a bert layer among others": NOT_CAUSAL.format(3, 2),
    "a bert layer that comes later": NOT_CAUSAL.format(2, 1),
    "a llama layer that is not causal": NOT_CAUSAL.format(2, 2),
    "eager, causal by nobody": r"module \d\.layer\.self_attn\.o_proj, differs by .* between slice and whole sequence",
    PACKED: r"4 query heads of one token as 2 queries of 2 key heads \(layer 1 \(\w+\), ",
}
sgd = partial(torch.optim.SGD, lr=0.2)


def train_in_slices(specs: list[Any], steps: list[Any], block: dict[str, Any], **options: Any) -> tuple[Any, Any, Any]:
    """The trace, lengths of the slices that ran, and of attention calls: of one query, is_causal, with a mask."""
    engine = build_engine(specs, mean_loss, token_pipeline=block, micro_batches=MICRO_BATCHES, **options)
    lengths: list[int] = []
    calls: set[tuple[bool, bool, bool]] = set()
    original = F.scaled_dot_product_attention

    def noted(query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False, **more: Any) -> Any:
        calls.add((query.shape[-2] == 1, is_causal, attn_mask is not None))
        return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **more)

    def count(module: Any, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():  # the look at the model before the first step is without gradients
            lengths.append((args[0][0] if isinstance(args[0], tuple) else args[0]).shape[1])

    engine.module.forward_funcs[0].register_forward_pre_hook(count)
    with mock.patch.object(F, "scaled_dot_product_attention", noted):
        trace = train(engine, steps)
    engine.destroy()
    return trace, sorted(lengths), calls


def trained(family: str, lengths: list[int], options: Any, mask: str | None, changes: Any) -> tuple[Any, ...]:
    """The largest difference from one process, and what ran."""
    from tests.hf import models  # here: what imports it are the ranks only, and the import takes seconds

    specs = models.model(models.decoders(family, **changes), learned_positions=family == "gpt2")
    steps = models.steps_of(STEPS, MICRO_BATCHES, mask)
    plain = train_plain(specs, mean_loss, steps, sgd)
    slices = len(lengths) if lengths is EQUAL else lengths
    got, ran, calls = train_in_slices(specs, steps, {"slices": slices}, **options)
    assert all(step and step.keys() == got.weights.keys() for step in got.gradients), "parameters without a gradient"
    differences = [abs(a / b - 1) for a, b in zip(got.losses, plain.losses, strict=True)]
    differences += [worst(a, b) for a, b in zip(got.gradients, plain.gradients, strict=True)]
    return max(*differences, worst(got.weights, plain.weights)), ran, calls


def refused() -> dict[str, str]:
    """What the first batch says of models that would train wrongly in slices."""
    from tests.hf import models

    llama, bert, said = models.decoders("llama"), models.decoders("bert"), {}
    still, padded = models.steps_of(1, MICRO_BATCHES), models.steps_of(1, MICRO_BATCHES, "padding")
    more = models.steps_of(2, 2 * MICRO_BATCHES)
    # it was not there to be looked at, and a slice of one token is all that is seen of it; on two replicas of one stage
    late = models.LayerSpec(models.Later, *bert[1].module_args, calls_aside=MICRO_BATCHES * 24)
    # without "verify", the rules of attention stand alone
    attempts: dict[str, tuple[list[Any], list[int], Any, bool, dict[str, Any]]] = {
        "bert": (bert, ONES, still, False, {}),
        "a bert layer among others": ([*llama[:2], bert[2], llama[3]], ONES, still, False, {}),
        "a bert layer that comes later": ([llama[0], late, *llama[2:]], EVERY, more, False, {"stages": 1}),
        "a llama layer that is not causal": (
            [llama[0], *models.decoders("llama", models.NotCausal)[1:]],
            ONES,
            still,
            False,
            {},
        ),
        "eager, causal by nobody": (models.decoders("llama", attn_implementation="eager"), ONES, still, True, {}),
        PACKED: (llama, ONES, padded, True, {}),
    }
    for name, (layers, lengths, steps, verify, options) in attempts.items():
        try:
            train_in_slices(models.model(layers), steps, {"slices": lengths, "verify": verify}, **options)
            said[name] = "trained"
        except ConfigError as error:
            said[name] = str(error)
    if not models.packs_heads():  # older versions repeat the keys, and that is fine
        assert said[PACKED] == "trained"
        said[PACKED] = ""
    return said


def worker(rank: int, world_size: int) -> Any:
    return {name: trained(*case) for name, case in CASES.items()}, refused()


ranks = launched(worker, 2, timeout=240, env={"HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("name", CASES)
def test_layers_train_in_slices_as_they_do_whole(ranks: list[Any], name: str) -> None:
    """Exact to rounding, and the model ran in slices of these lengths, with these calls of attention."""
    _, lengths, options, mask, _ = CASES[name]
    # counted are runs with gradients: a reentrant checkpoint's first is without, another's is not
    runs = 2 if options is NOT_REENTRANT else 1
    calls = {(one, not one and mask is None, mask is not None) for one in {length == 1 for length in lengths}}
    calls |= {(False, True, False)} if lengths is EVERY else set()  # of the look at the model
    for found, _ in ranks:
        difference, ran, called = found[name]
        assert difference <= 1e-5
        assert ran == sorted(lengths * runs * MICRO_BATCHES * STEPS) and called == calls


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrongly_is_refused(ranks: list[Any], name: str) -> None:
    for _, said in ranks:
        assert re.search(REFUSED[name], said[name]) or (name == PACKED and not said[name]), said[name]
