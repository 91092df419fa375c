"""Hugging Face's layers in a PipelineModule train in slices, of one token too, as they do whole, or are refused by name."""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ds_terapipe.errors import ConfigError
from tests.pipeline.models import mean_loss
from tests.pipeline.training import build_engine, train, train_plain, worst
from tests.spawn import launched

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed, extra hf")

STEPS, MICRO_BATCHES = 2, 2
ONES, EVERY = [1, 8, 1, 13, 1], [1] * 24
# a reentrant checkpoint of the embedding would cut it off: its inputs are whole numbers
LAYERS = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Decoder", "Logits"]}
REENTRANT = {"config": {"pipeline": {"use_reentrant": True}}, "module": LAYERS}
NOT_REENTRANT = {"config": {"pipeline": {"use_reentrant": False}}, "module": {"activation_checkpoint_interval": 2}}
# family, slices, options of the engine, the mask that travels along, options of the model
CASES: dict[str, tuple[str, Any, dict[str, Any], str | None, dict[str, Any]]] = {
    "llama": ("llama", 4, {}, None, {}),
    "llama, slices of one token": ("llama", ONES, {}, None, {}),
    "llama, every token": ("llama", EVERY, {}, None, {}),
    "gpt2, slices of one token": ("gpt2", ONES, {}, None, {}),
    "llama, recomputed": ("llama", ONES, REENTRANT, None, {}),
    "gpt2, recomputed": ("gpt2", ONES, NOT_REENTRANT, None, {}),
    "padding": ("llama", ONES, {}, "padding", {"num_key_value_heads": 4}),
    "padding, fewer key heads": ("llama", 4, {}, "padding", {}),
    "a sliding window": ("mistral", 4, {}, "window", {}),
}
NOT_CAUSAL = r"can't be cut: attention that is not causal \(layer {} \(\w+\), micro-batch 0, tokens 0 to {}\)"
PACKED = "fewer key heads, a mask, and one token"
REFUSED: dict[str, str] = {
    "a bert layer among others": NOT_CAUSAL.format(3, 2),
    "a bert layer that comes later": NOT_CAUSAL.format(2, 1),
    "a llama layer that is not causal": NOT_CAUSAL.format(2, 2),
    "eager, not causal by itself": r"module \d\.layer\.self_attn\.o_proj, differs by .* between slice and whole sequence",
    PACKED: r"4 query heads of one token as 2 queries of 2 key heads \(layer 1 \(\w+\), |^trained, as the keys are repeated$",
}


def trained(family: str, slices: Any, options: Any, mask: str | None, changes: Any) -> float:
    """The largest difference from one process."""
    from tests.hf import models  # here: what imports it are the ranks only, and the import takes seconds

    specs = models.model(models.decoders(family, **changes), learned_positions=family == "gpt2")
    steps = models.steps_of(STEPS, MICRO_BATCHES, mask)
    plain = train_plain(specs, mean_loss, steps, partial(torch.optim.SGD, lr=0.2))
    engine = build_engine(specs, mean_loss, token_pipeline={"slices": slices}, micro_batches=MICRO_BATCHES, **options)
    got = train(engine, steps)
    engine.destroy()
    assert all(step and step.keys() == got.weights.keys() for step in got.gradients), "parameters without a gradient"
    differences = [abs(a / b - 1) for a, b in zip(got.losses, plain.losses, strict=True)]
    differences += [worst(a, b) for a, b in zip(got.gradients, plain.gradients, strict=True)]
    return max(*differences, worst(got.weights, plain.weights))


def refused() -> dict[str, str]:
    """What the first batch says of models that would train wrongly in slices."""
    from tests.hf import models

    llama, bert, said = models.decoders("llama"), models.decoders("bert"), {}
    still, padded = models.steps_of(1, MICRO_BATCHES), models.steps_of(1, MICRO_BATCHES, "padding")
    # it was not there to be looked at, and a slice of one token is all that is seen of it; on two replicas of one stage
    later = models.LayerSpec(models.Later, *bert[1].module_args, calls_aside=MICRO_BATCHES * 24)
    not_causal = models.decoders("llama", models.NotCausal)[1:]
    more = models.steps_of(2, 2 * MICRO_BATCHES)
    # without "verify", the rules of attention stand alone
    attempts: dict[str, tuple[list[Any], list[int], Any, bool, int]] = {
        "a bert layer among others": ([*llama[:2], bert[2], llama[3]], ONES, still, False, 2),
        "a bert layer that comes later": ([llama[0], later, *llama[2:]], EVERY, more, False, 1),
        "a llama layer that is not causal": ([llama[0], *not_causal], ONES, still, False, 2),
        "eager, not causal by itself": (models.decoders("llama", attn_implementation="eager"), ONES, still, True, 2),
        PACKED: (llama, ONES, padded, True, 2),
    }
    for name, (layers, lengths, steps, verify, stages) in attempts.items():
        keys = {"slices": lengths, "verify": verify}
        engine = build_engine(models.model(layers), mean_loss, token_pipeline=keys, stages=stages)
        try:
            train(engine, steps)
            said[name] = "trained" if models.packs_heads() else "trained, as the keys are repeated"
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
        assert re.search(REFUSED[name], said[name]), said[name]
