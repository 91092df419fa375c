"""Refusals that refuse nothing: what must end a run with one line of error trains on instead."""

from __future__ import annotations

from typing import Any

import torch

from ds_terapipe.config import TOKEN_PIPELINE, TokenPipelineConfig
from ds_terapipe.errors import ConfigError
from tests.mutants.harness import Check, Hit, Mutant


def _lets_pass(original: Any, hit: Hit) -> Any:
    def check(*args: Any) -> None:
        try:
            original(*args)
        except ConfigError:
            hit()

    return check


def _counts_on(original: Any, hit: Hit) -> Any:
    def is_count(value: object, least: int = 1, most: float = 0) -> bool:
        without = original(value, least, float("inf"))
        if without and value > most > 0:  # type: ignore[operator]
            hit()
        return without

    return is_count


def _hears_nobody(original: Any, hit: Hit) -> Any:
    def exchange(model: Any, message: str) -> list[str]:
        told = original(model, message)
        if any(told):
            hit()
        return [""] * len(told)

    return exchange


def _drops_unknown(original: Any, hit: Hit) -> Any:
    def parse(config: Any) -> Any:
        block = config.get(TOKEN_PIPELINE)
        if isinstance(block, dict) and not set(block) <= set(TokenPipelineConfig.model_fields):
            hit()
            known = {name: value for name, value in block.items() if name in TokenPipelineConfig.model_fields}
            config = {**config, TOKEN_PIPELINE: known}
        return original(config)

    return parse


def _never_near(original: Any, hit: Hit) -> Any:
    def near_miss(key: object) -> None:
        if original(key) is not None:
            hit()

    return near_miss


def _finds_equal(original: Any, hit: Hit) -> Any:
    def difference(*args: Any) -> float:
        if original(*args) > 0:
            hit()
        return 0.0

    return difference


def _compares_nothing(original: Any, hit: Hit) -> Any:
    def compare(*args: Any) -> None:
        hit()

    return compare


def _takes_any_settings(original: Any, hit: Hit) -> Any:
    """Where only the settings differ; other numbers of micro-batches would never meet."""

    def raise_different(consensus: Any, micro_batches: int) -> None:
        rows = consensus._gather([micro_batches], torch.int64, "all ranks to say how they are configured")
        if any(row != rows[0] for row in rows):
            original(consensus, micro_batches)
        hit()

    return raise_different


KEYS = "no key is refused"
VALUES = "values that DeepSpeed cannot use are let pass"
BOUNDS = "whole numbers may be as large as one likes"
LAYERS = "no layer is refused"
ALONE = "what another rank finds is not raised"
UNKNOWN = "unknown keys are accepted"
NEAR = "misspelt keys beside ours are accepted"
EQUAL = "verify finds no difference"
NOTHING = "verify compares nothing"
SETTINGS = "settings are not compared between ranks"
LABELS = "labels are not compared with inputs"

_REFUSALS, _VERIFY, _CONTROL = (
    "ds_terapipe.refusals:",
    "ds_terapipe.pipeline.inspection.verify:",
    "ds_terapipe.pipeline.transport.consensus:",
)

MUTANTS = (
    Mutant(
        KEYS,
        "Keys that do not go with token slices, or with FusedLamb, are let pass.",
        ("ds_terapipe.refusals.configuration:check_rules",),
        _lets_pass,
        "refusals, ZeRO-3 beside FusedLamb",
    ),
    Mutant(
        VALUES,
        "DeepSpeed's own keys are not looked at.",
        (_REFUSALS + "check_keys",),
        _lets_pass,
        "refusals, DeepSpeed's keys",
    ),
    Mutant(
        BOUNDS,
        "Whole numbers have no upper bound.",
        ("ds_terapipe.config:is_count",),
        _counts_on,
        "refusals, large numbers",
    ),
    Mutant(
        LAYERS,
        "Layers that do not go with token slices are let pass.",
        (_REFUSALS + "check_model",),
        _lets_pass,
        "refusals, layers",
    ),
    Mutant(
        ALONE,
        "A rank goes on where another one has refused.",
        ("ds_terapipe.refusals.ranks:_exchange",),
        _hears_nobody,
        "refusals, found by one rank",
    ),
    Mutant(
        UNKNOWN,
        "Unknown keys in token_pipeline are dropped.",
        ("ds_terapipe.config:parse", "tests.test_config:parse"),
        _drops_unknown,
        "refusals, a misspelt key",
    ),
    Mutant(
        NEAR,
        "A top-level key that is nearly ours is left to DeepSpeed, which ignores it.",
        ("ds_terapipe.register:_near_miss",),
        _never_near,
        "refusals, configurations",
    ),
    Mutant(
        EQUAL,
        "All tensors that verify compares are alike.",
        (_VERIFY + "_difference",),
        _finds_equal,
        "refusals, verify on one stage",
    ),
    Mutant(
        NOTHING,
        "Verify runs the model whole and sliced and compares nothing.",
        (_VERIFY + "_OneLayer.compare",),
        _compares_nothing,
        "refusals, verify on one stage",
    ),
    Mutant(
        SETTINGS,
        "Ranks train together with settings that differ.",
        (_CONTROL + "Consensus._raise_different",),
        _takes_any_settings,
        "refusals, settings and data",
    ),
    Mutant(
        LABELS,
        "Labels may have another length than inputs.",
        (_CONTROL + "_check_labels",),
        _lets_pass,
        "refusals, settings and data",
    ),
)

_NAMES = tuple(mutant.name for mutant in MUTANTS)


def _check(name: str, measure: str, args: tuple[Any, ...], catches: tuple[str, ...], why: str) -> Check:
    return Check(name, measure, args, catches, {other: why for other in _NAMES if other not in catches})


_ZERO_3 = {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}}

CHECKS = (
    _check(
        "refusals, ZeRO-3 beside FusedLamb",
        "tests.mutants.claims:passes",
        (
            "tests.optim.test_json_keys:test_what_is_refused",
            _ZERO_3,
            r"zero_optimization\.stage: got 3, must be 0, 1 or 2",
        ),
        (KEYS,),
        "is about one key of DeepSpeed's",
    ),
    _check(
        "refusals, a misspelt key",
        "tests.mutants.claims:passes",
        ("tests.test_config:test_refused", {"slice": 8}, ['token_pipeline: unknown key "slice"', 'use "slices"']),
        (UNKNOWN,),
        "is about keys in token_pipeline",
    ),
    _check(
        "refusals, DeepSpeed's keys",
        "tests.mutants.claims:passes",
        ("tests.test_refusals:test_a_block_that_an_argument_stands_in_for_is_not_read",),
        (VALUES,),
        "is about two of DeepSpeed's keys",
    ),
    _check(
        "refusals, large numbers",
        "tests.mutants.claims:passes",
        ("tests.test_config:test_what_nothing_can_hold_is_refused", "token_pipeline.granularity"),
        (BOUNDS,),
        "is about a number in token_pipeline",
    ),
    _check(
        "refusals, configurations",
        "tests.test_refusals:configs_are_refused",
        ("timers", "elastic", "key", "top-level key"),
        (KEYS, UNKNOWN, NEAR),
        "is about configurations, the same on all ranks, and trains nothing",
    ),
    _check(
        "refusals, layers",
        "tests.test_refusals:layers_are_refused",
        ("experts by number", "sequence_parallel layer", "use_flash_attn", "rotary by mark"),
        (LAYERS,),
        "is about layers, and trains nothing",
    ),
    _check(
        "refusals, found by one rank",
        "tests.test_refusals:all_are_told",
        (),
        (ALONE,),
        "makes its own error, and trains nothing",
    ),
    _check(
        "refusals, verify on one stage",
        "tests.pipeline.test_verify:differences_are_found",
        (),
        (EQUAL, NOTHING),
        "is about layers whose slices compute something else",
    ),
    _check(
        "refusals, verify",
        "tests.pipeline.test_verify:models_are_refused",
        ("positions", "hand-written", "convolution", "mean", "recurrent", "last token"),
        (EQUAL, NOTHING),
        "is about models whose slices compute something else",
    ),
    _check(
        "refusals, settings and data",
        "tests.pipeline.test_bad_input:two_are_told",
        (("other time", "misspelt"), ("labels of more tokens",)),
        (UNKNOWN, SETTINGS, LABELS),
        "is about settings and data",
    ),
)
