"""Hugging Face's layers in a PipelineModule train in slices, of one token too, as they do whole, or are refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_terapipe.errors import ConfigError
from tests.pipeline.models import mean_loss
from tests.pipeline.training import Trace, build_engine, train, train_plain, worst
from tests.spawn import launched

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed, extra hf")

STEPS, MICRO_BATCHES = 2, 2
EVERYWHERE = [1, 8, 1, 13, 1]
CUTS: dict[str, list[int]] = {
    "equal": [6, 6, 6, 6],
    "one token first, inside and last": EVERYWHERE,
    "one token first": [1, 9, 5, 9],
    "one token inside": [7, 1, 1, 9, 6],
    "one token last": [9, 8, 6, 1],
    "every token": [1] * 24,
}
CASES = [("llama", cut) for cut in CUTS]
CASES += [(family, cut) for family in ("qwen2", "mistral", "gpt2") for cut in list(CUTS)[:2]]
CHECKPOINTED = [("llama", 1, True), ("llama", 2, False), ("gpt2", 1, True)]
BY_ONE, BY_SEVERAL = (True, False, False), (False, True, False)  # calls of one query and of several, see `watched`
sgd = partial(torch.optim.SGD, lr=0.2)


@contextmanager
def watched(seen: set[tuple[bool, bool, bool]]) -> Iterator[None]:
    """Note of every call of PyTorch's attention: is it of one query, does it say is_causal, has it a mask."""
    original = F.scaled_dot_product_attention

    def noted(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False, **options: Any
    ) -> Any:
        seen.add((query.shape[-2] == 1, is_causal, attn_mask is not None))
        return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    F.scaled_dot_product_attention = noted
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def train_in_slices(specs: list[Any], steps: list[Any], block: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Train with an engine: the trace, the lengths of the slices that ran in each step, and the kinds of attention calls."""
    engine = build_engine(specs, mean_loss, token_pipeline=block, micro_batches=MICRO_BATCHES, **options)
    lengths: list[int] = []

    def count(module: Any, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():  # the look at the model before the first step is without gradients
            lengths.append((args[0][0] if isinstance(args[0], tuple) else args[0]).shape[1])

    first = engine.module.forward_funcs[0]
    first.register_forward_pre_hook(count)
    calls: set[tuple[bool, bool, bool]] = set()
    with watched(calls):
        trace = train(engine, steps)
    engine.destroy()
    return {"trace": trace, "lengths": sorted(lengths), "calls": calls}


def compared(ran: dict[str, Any], expected: Trace, uncut: Trace | None = None) -> dict[str, Any]:
    """What of a training in slices is asserted about, small enough to be sent."""
    got = ran["trace"]
    for step in got.gradients:
        assert step and step.keys() == got.weights.keys(), "parameters without a gradient"
    result = {
        "losses": max(abs(a / b - 1) for a, b in zip(got.losses, expected.losses, strict=True)),
        "gradients": max(worst(a, b) for a, b in zip(got.gradients, expected.gradients, strict=True)),
        "weights": worst(got.weights, expected.weights),
    }
    if uncut is not None:
        result["uncut losses"] = max(abs(a / b - 1) for a, b in zip(got.losses, uncut.losses, strict=True))
    return {"differences": result, "lengths": ran["lengths"], "calls": ran["calls"], "losses": got.losses}


def reference(family: str, mask: str | None = None, **options: Any) -> tuple[list[Any], list[Any], Trace]:
    """A model of a family, its batches, and its training whole in this process."""
    from tests.hf import models  # here: what imports it are the ranks only, and the import takes seconds

    specs = models.model(models.decoders(family, **options), learned_positions=family == "gpt2")
    steps = models.steps_of(STEPS, MICRO_BATCHES, mask)
    return specs, steps, train_plain(specs, mean_loss, steps, sgd)


def trained() -> dict[Any, Any]:
    """Each family cut in each way, against one process and against DeepSpeed's own engine."""
    found: dict[Any, Any] = {}
    for family in dict(CASES):
        specs, steps, plain = reference(family)
        uncut = train_in_slices(specs, steps, None)["trace"]
        for index, cut in enumerate(cut for name, cut in CASES if name == family):
            slices = len(CUTS[cut]) if cut == "equal" else CUTS[cut]
            ran = train_in_slices(specs, steps, {"slices": slices, "schedule": ("1f1b", "terapipe")[index % 2]})
            found[family, cut] = compared(ran, plain, uncut)
    return found


def checkpointed() -> dict[Any, Any]:
    """DeepSpeed's activation checkpointing: slices of one token are recomputed in backward."""
    found = {}
    for family, interval, reentrant in CHECKPOINTED:
        specs, steps, plain = reference(family)
        options = {
            "config": {"pipeline": {"use_reentrant": reentrant}},
            "module": {
                "activation_checkpoint_interval": interval,
                # a reentrant checkpoint of the embedding would cut it off: its inputs are whole numbers
                "checkpointable_layers": ["Decoder", "Logits"] if reentrant else None,
            },
        }
        ran = train_in_slices(specs, steps, {"slices": EVERYWHERE}, **options)
        found[family, interval, reentrant] = compared(ran, plain)
    return found


# family, its options, the mask that travels along, slices
MASKED: dict[str, tuple[str, dict[str, Any], str, list[int]]] = {
    "padding": ("llama", {"num_key_value_heads": 4}, "padding", EVERYWHERE),
    "padding, fewer key heads": ("llama", {}, "padding", CUTS["equal"]),
    "a sliding window": ("mistral", {"sliding_window": 5}, "window", CUTS["equal"]),
}


def masked() -> dict[Any, Any]:
    """Masks [b, 1, s, s] that travel along, as Hugging Face makes them of padding and of sliding windows."""
    found = {}
    for name, (family, options, mask, lengths) in MASKED.items():
        specs, steps, plain = reference(family, mask, **options)
        found[name] = compared(train_in_slices(specs, steps, {"slices": lengths}), plain)
    return found


NOT_CAUSAL = r"can't be cut: attention that is not causal \(layer {} \(\w+\), micro-batch 0, tokens 0 to 2\)"
PACKED = "fewer key heads, a mask, and one token"
REFUSED: dict[str, str] = {
    **{f"bert, {cut}": NOT_CAUSAL.format(1) for cut in ("equal", "one token first, inside and last", "every token")},
    "a bert layer among others": NOT_CAUSAL.format(3),
    "a bert layer that comes later": NOT_CAUSAL.format(2).replace("tokens 0 to 2", "tokens 0 to 1"),
    "a llama layer that is not causal": NOT_CAUSAL.format(2),
    "eager, causal by nobody": r"module \d\.layer\.self_attn\.o_proj, differs by .* between slice and whole sequence",
    PACKED: r"4 query heads of one token as 2 queries of 2 key heads \(layer 1 \(\w+\), ",
}


def refused() -> dict[str, str]:
    """What the first batch says of models that would train wrongly in slices."""
    from tests.hf import models

    llama, bert, steps = models.decoders("llama"), models.decoders("bert"), models.steps_of(1, MICRO_BATCHES)
    said = {}

    def attempt(
        name: str, layers: list[Any], lengths: list[int], steps: list[Any] = steps, verify: bool = False, **options: Any
    ) -> None:
        block = {"slices": lengths, "verify": verify}  # without "verify", the rules of attention stand alone
        try:
            train_in_slices(models.model(layers), steps, block, **options)
            said[name] = "trained"
        except ConfigError as error:
            said[name] = str(error)

    for cut in ("equal", "one token first, inside and last", "every token"):
        attempt(f"bert, {cut}", bert, CUTS[cut])
    attempt("a bert layer among others", [*llama[:2], bert[2], llama[3]], EVERYWHERE)
    # it was not there to be looked at, and a slice of one token is all that is seen of it; on two replicas of one stage
    late = [llama[0], models.later(bert[1], calls_aside=MICRO_BATCHES * 24), *llama[2:]]
    attempt("a bert layer that comes later", late, CUTS["every token"], models.steps_of(2, 2 * MICRO_BATCHES), stages=1)
    attempt("a llama layer that is not causal", [llama[0], *models.not_causal()[1:]], EVERYWHERE)
    eager = models.decoders("llama", attn_implementation="eager")
    attempt("eager, causal by nobody", eager, EVERYWHERE, verify=True)
    padded = models.steps_of(1, MICRO_BATCHES, "padding")
    attempt(PACKED, llama, EVERYWHERE, padded, verify=True)
    said["packs heads"] = str(models.packs_heads())
    return said


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {"trained": trained(), "checkpointed": checkpointed(), "masked": masked(), "refused": refused()}


ranks = launched(worker, 2, timeout=240, env={"HF_HUB_OFFLINE": "1"})


def check(result: dict[str, Any], lengths: list[int], calls: set[Any]) -> None:
    """Exact to rounding, and it was in slices of these lengths that the model ran, with these calls of attention."""
    assert max(result["differences"].values()) <= 1e-5, result["differences"]
    assert result["differences"].get("uncut losses", 0.0) <= 1e-7
    assert result["lengths"] == sorted(lengths * MICRO_BATCHES * STEPS)
    assert result["calls"] == calls


@pytest.mark.parametrize(("family", "cut"), CASES)
def test_layers_train_in_slices_as_they_do_whole(ranks: list[dict[str, Any]], family: str, cut: str) -> None:
    # the slices of several tokens are those of the look at the model where a step has none
    calls = {BY_SEVERAL} | ({BY_ONE} if 1 in CUTS[cut] else set())
    for results in ranks:
        check(results["trained"][family, cut], CUTS[cut], calls)


@pytest.mark.parametrize("case", CHECKPOINTED, ids=str)
def test_one_token_is_recomputed_as_it_ran(ranks: list[dict[str, Any]], case: tuple[str, int, bool]) -> None:
    for results in ranks:
        # counted are runs with gradients: a reentrant checkpoint's first is without, another's is not
        runs = 1 if case[2] else 2
        check(results["checkpointed"][case], EVERYWHERE * runs, {BY_ONE, BY_SEVERAL})


@pytest.mark.parametrize("name", MASKED)
def test_masks_travel_along(ranks: list[dict[str, Any]], name: str) -> None:
    lengths = MASKED[name][3]
    calls = {(one, False, True) for one in {length == 1 for length in lengths}}
    for results in ranks:
        check(results["masked"][name], lengths, calls)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrongly_is_refused(ranks: list[dict[str, Any]], name: str) -> None:
    for results in ranks:
        said = results["refused"]
        if name == PACKED and said["packs heads"] == "False":
            assert said[name] == "trained"  # older versions repeat the keys, and that is fine
        else:
            assert re.search(REFUSED[name], said[name]), said[name]
