"""The keys of ds_config.json: defaults, what is accepted, and the one line that every mistake gets."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_terapipe import FusedLamb
from ds_terapipe.config import TokenPipelineConfig, parse
from ds_terapipe.elastic import settings
from ds_terapipe.errors import LARGEST_COUNT, ConfigError, bad_value, nearest, shown
from ds_terapipe.optim.schedules.lr_schedules import LambWarmup
from tests.json_values import JSON
from tests.schedule.strategies import SCHEDULES


def parsed(**block):
    return parse({"train_batch_size": 1, "token_pipeline": block})


def test_the_defaults():
    assert parsed(slices=8).model_dump() == {
        "enabled": True,
        "slices": 8,
        "schedule": "auto",
        "granularity": 8,
        "memory_gb": None,
        "plan_path": None,
        "measurements_path": None,
        "layout": "auto",
        "cut": None,
        "verify": True,
        "weight_gradients": "auto",
        "timeout_s": 600.0,
        "trace_path": None,
        "trace_steps": None,
    }
    assert parsed().slices == "auto"


def test_absent_and_disabled_blocks_are_the_same():
    assert parse({"train_batch_size": 1}) is None and parsed(enabled=False) is None
    assert parsed(enabled=False, slices="nonsense", colour="red") is None


@pytest.mark.parametrize(
    "block",
    [
        {"slices": 1},
        {"slices": [3, 2, 2]},
        {"slices": 8, "schedule": "terapipe"},
        {"slices": 8, "layout": "sbh"},
        {"slices": "auto", "memory_gb": 16},
        {"granularity": 16},
        {"plan_path": "plan.json"},
        {"slices": 8, "verify": False},
        {"slices": 8, "timeout_s": 0.5},
        {"slices": 8, "timeout_s": 31536000},
        {"slices": 8, "trace_path": "t.json", "trace_steps": [1, 1]},
        {"slices": 8, "cut": {"inputs": [1, [2, 3], None], "labels": [1]}},
    ],
    ids=str,
)
def test_values_are_taken_as_they_are(block):
    for name, value in block.items():
        assert getattr(parsed(**block), name) == value
    assert parsed(slices=(3, 2)).slices == [3, 2]


SLICES = 'must be a positive number, a list of lengths or "auto"'
YEAR = "a positive number of seconds"
# key, value, message behind the key (or in it); what stands beside the key
REFUSED: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("slices", -3, f"got -3, {SLICES}, use e.g. 8", {}),
    ("slices", 0, f"got 0, {SLICES}, use e.g. 8", {}),
    ("slices", 2.5, f"got 2.5, {SLICES}", {}),
    ("slices", 8.0, f"got 8.0, {SLICES}", {}),
    ("slices", True, f"got true, {SLICES}", {}),
    ("slices", "8", f'got "8", {SLICES}, use e.g. 8', {}),
    ("slices", None, f"got null, {SLICES}", {}),
    ("slices", [], f"got [], {SLICES}", {}),
    ("slices", [3, -1], f"got [3, -1], {SLICES}", {}),
    ("slices", [1, "a"], f'got [1, "a"], {SLICES}', {}),
    ("slices", [1, True], f"got [1, true], {SLICES}", {}),
    ("slices", {"n": 8}, f'got {{"n": 8}}, {SLICES}', {}),
    ("slices", "Auto", f'got "Auto", {SLICES}, use "auto"', {}),
    ("granularity", 0, "got 0, must be a positive number of tokens", {}),
    ("granularity", 8, "got 8, must be absent beside slices that are", {"slices": 8}),
    ("memory_gb", -1, "got -1, must be a positive number", {}),
    ("plan_path", "plan.json", 'got "plan.json", must be absent beside slices', {"slices": 8}),
    ("plan_path", 3, "got 3, must be the name of a file", {}),
    ("schedule", "1F1b", f'got "1F1b", must be "auto" or {SCHEDULES}, use "1f1b"', {"slices": 8}),
    ("schedule", "terrapipe", 'use "terapipe"', {"slices": 8}),
    ("schedule", 3, 'use "auto"', {"slices": 8}),
    ("weight_gradients", "once", '"micro_batch" or "slice"', {"slices": 8}),
    ("layout", "bs_h", '"auto" or "bsh" or "sbh", use "bsh"', {"slices": 8}),
    ("verify", 1, "got 1, must be true or false", {"slices": 8}),
    ("verify", "auto", 'got "auto", must be true or false', {"slices": 8}),
    ("enabled", "yes", 'got "yes", must be true or false', {"slices": 8}),
    ("pack_weights", 0, "got 0, must be absent (weights are no longer packed), leave it out", {"slices": 8}),
    ("timeout_s", 0, f"got 0, must be {YEAR}", {"slices": 8}),
    ("timeout_s", "60", f'got "60", must be {YEAR}', {"slices": 8}),
    ("timeout_s", True, f"got true, must be {YEAR}", {"slices": 8}),
    ("timeout_s", float("inf"), YEAR, {"slices": 8}),
    ("timeout_s", 31536001, "at most a year (31536000), use e.g. 600", {"slices": 8}),
    ("trace_path", "", 'got "", must be the name of a file, use "trace.json"', {"slices": 8}),
    ("trace_path", True, "got true, must be the name of a file", {"slices": 8}),
    ("trace_steps", [2, 3], "got [2, 3], must be absent without trace_path", {}),
    ("trace_steps", 3, "use e.g. [3, 5]", {"slices": 8}),
    ("trace_steps", [0, 4], "counted from 1", {"slices": 8}),
    ("trace_steps", [5, 4], "got [5, 4]", {"slices": 8}),
    ("cut", [1], "got [1], must be", {"slices": 8}),
    ("cut", {}, "got {}, must be", {"slices": 8}),
    ("cut", {"imputs": [1]}, 'token_pipeline.cut: unknown key "imputs"', {"slices": 8}),
    ("cut.inputs", 1, "got 1, must be a list with one entry per tensor", {"slices": 8}),
    ("cut.labels", [0], "0 is the batch", {"slices": 8}),
    ("cut.inputs", [[1, 1]], "got [[1, 1]]", {"slices": 8}),
    ("cut.inputs", [[]], "got [[]]", {"slices": 8}),
    ("slice", 8, 'token_pipeline: unknown key "slice", must be', {}),
    ("time-out-s", 3, 'use "timeout_s"', {}),
    ("xyzzy", 3, "slices, schedule", {}),
]


@pytest.mark.parametrize(("key", "value", "says", "beside"), REFUSED)
def test_mistakes_are_one_line_with_key_value_and_rule(key, value, says, beside):
    *outer, name = key.split(".")
    block = {**beside, **({outer[0]: {name: value}} if outer else {name: value})}
    with pytest.raises(ConfigError) as caught:
        parsed(**block)
    message = str(caught.value)
    assert says in message and "\n" not in message and re.search(", (use|leave) ", message)
    assert message.startswith(f"token_pipeline.{key}: got " if "unknown key" not in message else "token_pipeline")


@pytest.mark.parametrize("block", [3, None, True, "on", [8]])
def test_a_block_has_to_be_one(block):
    with pytest.raises(ConfigError, match=r"token_pipeline: got .*, must be a block of keys"):
        parse({"token_pipeline": block})


def test_direct_construction_gives_the_same_errors():
    with pytest.raises(ConfigError, match=r"token_pipeline\.slices: got -3"):
        TokenPipelineConfig(slices=-3)
    with pytest.raises(ConfigError, match='unknown key "slcies"'):
        TokenPipelineConfig(slcies=3)
    assert TokenPipelineConfig(slices=3, layout="auto").layout == "auto"


@given(key=st.sampled_from(sorted(TokenPipelineConfig.model_fields)), value=JSON)
def test_any_value_is_taken_as_it_is_or_refused_in_one_line(key, value):
    try:
        config = parse({"token_pipeline": {"slices": 8, key: value}})
    except ConfigError as error:
        assert re.fullmatch(rf"token_pipeline\.{key}.*must be.*, use .*", str(error))
        return
    if config is None:
        assert (key, value) == ("enabled", False)
    elif key == "cut" and value is not None:
        given_cuts, cuts = ({k: v for k, v in each.items() if v is not None} for each in (value, config.cut))
        assert cuts == given_cuts
    else:
        assert getattr(config, key) == value and isinstance(value, bool) == isinstance(getattr(config, key), bool)
        assert not isinstance(value, (int, float)) or value <= LARGEST_COUNT
        assert not isinstance(value, str) or os.fsencode(value)


def test_messages_are_short_and_name_what_is_near():
    assert len(str(bad_value("key", "x" * 5000, "short", "less"))) < 200
    assert shown({1, 2}).startswith("{1")
    assert nearest("Time-Out", ["timeout_s", "slices"]) == "timeout_s"
    assert nearest("zzz", ["timeout_s", "slices"]) is None


BIG, HUGE, EXACT, PATHS = 10**400, 10**300, 2**53, ["a\0b", "\ud800"]  # JSON has no limit
CACHE = {"enabled": True, "disk_path": "cache/"}
BOUNDS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "token_pipeline.timeout_s": ({}, [BIG]),
    "token_pipeline.slices": ({}, [HUGE, BIG, EXACT + 1, [1, HUGE]]),
    "token_pipeline.granularity": ({}, [HUGE, BIG, EXACT + 1]),
    "token_pipeline.memory_gb": ({}, [HUGE, BIG, 1e308, 1.1e9]),
    "token_pipeline.trace_steps": ({"trace_path": "trace.json"}, [[1, BIG]]),
    "token_pipeline.trace_path": ({}, PATHS),
    "token_pipeline.plan_path": ({}, PATHS),
    "token_pipeline.measurements_path": ({}, PATHS),
    "elastic_pipeline.freeze.alpha": ({"policy": "alpha"}, [BIG]),
    "elastic_pipeline.freeze.interval": ({"policy": "alpha"}, [HUGE, BIG]),
    "elastic_pipeline.freeze.patience": ({"policy": "plateau"}, [HUGE, BIG]),
    "elastic_pipeline.freeze.frozen_layers": ({"policy": "schedule"}, [[[HUGE, 1]], [[1, BIG]]]),
    "elastic_pipeline.resize.policy": ({}, [[[BIG, 1]]]),
    "elastic_pipeline.resize.memory_gb": ({}, [BIG, 1e308]),
    "elastic_pipeline.cache.memory_gb": (CACHE, [BIG, 1e308]),
    "elastic_pipeline.cache.disk_gb": (CACHE, [BIG, 1e308]),
    "elastic_pipeline.cache.disk_path": (CACHE, PATHS),
    "elastic_pipeline.data.seed": ({}, [HUGE, BIG, 2**63]),
    "elastic_pipeline.history_path": ({}, PATHS),
}


@pytest.mark.parametrize("path", BOUNDS)
def test_what_nothing_can_hold_is_refused(path):
    beside, values = BOUNDS[path]
    for value in values:
        block, *names = path.split(".")
        config: Any = {**beside, names.pop(): value}
        for name in reversed(names):
            config = {name: config}
        with pytest.raises(ConfigError, match=rf"^{re.escape(path)}: got .*, must be .*, use [^\n]*$"):
            parse({block: config})
            settings.parse({block: config})


@pytest.mark.parametrize(
    "name", ["lr", "eps", "weight_decay", "max_grad_norm", "min_coeff", "max_coeff", "weight_norm_clip"]
)
def test_what_nothing_can_hold_is_refused_for_the_optimizer(name):
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{name}: got 1000+"):
        FusedLamb([torch.nn.Parameter(torch.zeros(2))], **{name: BIG})


@pytest.mark.parametrize("name", ["reference_lr", "reference_batch_size", "total_steps", "warmup_ratio"])
def test_what_nothing_can_hold_is_refused_for_schedulers(name):
    params = {"reference_lr": 1e-3, "reference_batch_size": 32, "total_steps": 10, "warmup_ratio": 0.1}
    for value in (BIG, HUGE) if name != "reference_lr" else (BIG,):
        with pytest.raises(ConfigError, match=rf"{name}: got 1000+"):
            LambWarmup.checked({**params, name: value})
