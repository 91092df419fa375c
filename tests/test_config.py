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
from ds_terapipe.errors import LARGEST_COUNT, ConfigError, bad_value, nearest, shown
from tests.json_values import JSON
from tests.schedule.strategies import SCHEDULES


def parsed(**block):
    return parse({"train_batch_size": 1, "token_pipeline": block})


def refused(**block) -> str:
    with pytest.raises(ConfigError) as caught:
        parsed(**block)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults():
    config = parsed(slices=8)
    assert config.model_dump() == {
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


def test_absent_and_disabled_blocks_are_the_same():
    assert parse({"train_batch_size": 1}) is None
    assert parsed(enabled=False) is None
    assert parsed(enabled=False, slices="nonsense", colour="red") is None


def test_the_form_of_an_error():
    assert refused(slices=-3) == (
        'token_pipeline.slices: got -3, must be a positive number, a list of lengths or "auto", use e.g. 8'
    )


@pytest.mark.parametrize(
    ("block", "attribute", "value"),
    [
        ({"slices": 1}, "slices", 1),
        ({"slices": [3, 2, 2]}, "slices", [3, 2, 2]),
        ({"slices": (3, 2)}, "slices", [3, 2]),
        ({"slices": 8, "schedule": "terapipe"}, "schedule", "terapipe"),
        ({"slices": 8, "layout": "auto"}, "layout", "auto"),
        ({}, "slices", "auto"),
        ({"slices": "auto", "memory_gb": 16}, "memory_gb", 16.0),
        ({"granularity": 16}, "granularity", 16),
        ({"plan_path": "plan.json"}, "plan_path", "plan.json"),
        ({"slices": 8, "layout": "sbh"}, "layout", "sbh"),
        ({"slices": 8, "verify": False}, "verify", False),
        ({"slices": 8, "timeout_s": 5}, "timeout_s", 5.0),
        ({"slices": 8, "timeout_s": 0.5}, "timeout_s", 0.5),
        ({"slices": 8, "timeout_s": 31536000}, "timeout_s", 31536000.0),
        ({"slices": 8, "trace_path": "runs/trace.json"}, "trace_path", "runs/trace.json"),
        ({"slices": 8, "trace_path": "t.json", "trace_steps": [1, 1]}, "trace_steps", [1, 1]),
        ({"slices": 8, "cut": None}, "cut", None),
        ({"slices": 8, "cut": {"inputs": [1, [2, 3], None]}}, "cut", {"inputs": [1, [2, 3], None], "labels": None}),
        ({"slices": 8, "cut": {"labels": [1]}}, "cut", {"inputs": None, "labels": [1]}),
    ],
)
def test_accepted(block, attribute, value):
    assert getattr(parsed(**block), attribute) == value


SLICES = 'must be a positive number, a list of lengths or "auto"'


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({"slices": 0}, ["token_pipeline.slices: got 0", SLICES, "use e.g. 8"]),
        ({"slices": 2.5}, ["got 2.5", SLICES]),
        ({"slices": 8.0}, ["got 8.0", SLICES]),
        ({"slices": True}, ["got true", SLICES]),
        ({"slices": "8"}, ['got "8"', SLICES, "use e.g. 8"]),
        ({"slices": None}, ["got null", SLICES]),
        ({"slices": []}, ["got []", SLICES]),
        ({"slices": [3, -1]}, ["got [3, -1]", SLICES]),
        ({"slices": [1, "a"]}, ['got [1, "a"]', SLICES]),
        ({"slices": [1, True]}, ["got [1, true]", SLICES]),
        ({"slices": {"n": 8}}, ['got {"n": 8}', SLICES]),
        ({"slices": "automatic"}, ['got "automatic"', SLICES, 'use "auto"']),
        ({"granularity": 0}, ["token_pipeline.granularity: got 0", "positive number of tokens"]),
        ({"memory_gb": -1}, ["token_pipeline.memory_gb: got -1", "use e.g. 16"]),
        (
            {"slices": 8, "plan_path": "plan.json"},
            ['token_pipeline.plan_path: got "plan.json"', "absent beside slices"],
        ),
        *(
            (
                {"slices": 8, "granularity": tokens},
                [f"granularity: got {tokens}, must be absent beside slices that are"],
            )
            for tokens in (8, 16)
        ),
        ({"plan_path": 3}, ["token_pipeline.plan_path: got 3", 'use "plan.json"']),
        ({"slices": 8, "schedule": "1F1b"}, ["token_pipeline.schedule", SCHEDULES, 'use "1f1b"']),
        ({"slices": 8, "schedule": "terrapipe"}, [SCHEDULES, 'use "terapipe"']),
        ({"slices": 8, "schedule": "gpipe"}, ['got "gpipe"', '"auto" or ' + SCHEDULES, "use "]),
        ({"slices": 8, "schedule": 3}, ["token_pipeline.schedule: got 3", 'use "auto"']),
        ({"slices": 8, "weight_gradients": "once"}, ["token_pipeline.weight_gradients", '"micro_batch" or "slice"']),
        ({"slices": 8, "layout": "bs_h"}, ["token_pipeline.layout", '"auto" or "bsh" or "sbh"', 'use "bsh"']),
        ({"slices": 8, "verify": 1}, ["token_pipeline.verify: got 1", "true or false"]),
        ({"slices": 8, "pack_weights": 0}, ["token_pipeline.pack_weights: got 0", "no longer packed", "leave it out"]),
        ({"pack_weights": True}, ["token_pipeline.pack_weights: got true", "no longer packed", "leave it out"]),
        ({"slices": 8, "verify": "auto"}, ['token_pipeline.verify: got "auto"', "true or false"]),
        ({"slices": 8, "enabled": "yes"}, ['token_pipeline.enabled: got "yes"', "true or false"]),
        ({"slices": 8, "timeout_s": 0}, ["token_pipeline.timeout_s: got 0", "positive number of seconds"]),
        ({"slices": 8, "trace_path": ""}, ['token_pipeline.trace_path: got ""', 'use "trace.json"']),
        ({"slices": 8, "trace_path": True}, ["token_pipeline.trace_path: got true", "name of a file"]),
        ({"slices": "Auto"}, ['token_pipeline.slices: got "Auto"', SLICES, 'use "auto"']),
        (
            {"trace_steps": [2, 3]},
            ["trace_steps: got [2, 3], must be absent without trace_path", '"trace_path": "trace.json"'],
        ),
        ({"slices": 8, "trace_steps": 3}, ["token_pipeline.trace_steps: got 3", "use e.g. [3, 5]"]),
        ({"slices": 8, "trace_steps": [0, 4]}, ["token_pipeline.trace_steps: got [0, 4]", "counted from 1"]),
        ({"slices": 8, "trace_steps": [5, 4]}, ["token_pipeline.trace_steps: got [5, 4]"]),
        ({"slices": 8, "timeout_s": -1.5}, ["got -1.5", "positive number of seconds"]),
        ({"slices": 8, "timeout_s": "60"}, ['got "60"', "use e.g. 600"]),
        ({"slices": 8, "timeout_s": True}, ["got true", "positive number of seconds"]),
        ({"slices": 8, "timeout_s": float("inf")}, ["token_pipeline.timeout_s", "positive number of seconds"]),
        (
            {"slices": 8, "timeout_s": 1e15},
            ["token_pipeline.timeout_s: got 1000000000000000.0", "at most a year (31536000)"],
        ),
        ({"slices": 8, "timeout_s": 31536001}, ["token_pipeline.timeout_s: got 31536001", "use e.g. 600"]),
        ({"slices": 8, "timeout_s": "auto"}, ['token_pipeline.timeout_s: got "auto"']),
        ({"slices": 8, "cut": [1]}, ["token_pipeline.cut: got [1]", "inputs, labels or both"]),
        ({"slices": 8, "cut": {}}, ["token_pipeline.cut: got {}"]),
        ({"slices": 8, "cut": {"imputs": [1]}}, ['token_pipeline.cut: unknown key "imputs"', 'use "inputs"']),
        ({"slices": 8, "cut": {"inputs": 1}}, ["token_pipeline.cut.inputs: got 1", "one entry per tensor"]),
        ({"slices": 8, "cut": {"labels": [0]}}, ["token_pipeline.cut.labels: got [0]", "0 is the batch"]),
        ({"slices": 8, "cut": {"inputs": [[1, 1]]}}, ["token_pipeline.cut.inputs: got [[1, 1]]"]),
        ({"slices": 8, "cut": {"inputs": [[]]}}, ["token_pipeline.cut.inputs: got [[]]"]),
        ({"slice": 8}, ['token_pipeline: unknown key "slice"', 'use "slices"']),
        ({"slices": 8, "shedule": "1f1b"}, ['unknown key "shedule"', 'use "schedule"']),
        ({"slices": 8, "time-out-s": 3}, ['unknown key "time-out-s"', 'use "timeout_s"']),
        ({"slices": 8, "xyzzy": 3}, ['unknown key "xyzzy"', "slices, schedule", "use one of them"]),
    ],
)
def test_refused(block, parts):
    message = refused(**block)
    for part in parts:
        assert part in message


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
    block = {"slices": 8, key: value}
    try:
        config = parse({"token_pipeline": block})
    except ConfigError as error:
        assert str(error).startswith(f"token_pipeline.{key}")
        assert "\n" not in str(error)
        assert "must be" in str(error) and ", use " in str(error)
    else:
        if key == "cut" and value is not None:
            assert {name: tensors for name, tensors in config.cut.items() if tensors is not None} == {
                name: tensors for name, tensors in value.items() if tensors is not None
            }
        elif config is not None:
            assert getattr(config, key) == value
            assert not isinstance(value, (int, float)) or value <= LARGEST_COUNT
            assert not isinstance(value, str) or os.fsencode(value)
            assert isinstance(value, bool) == isinstance(getattr(config, key), bool)
        else:
            assert block.get("enabled") is False


def test_long_values_are_cut_short():
    assert len(str(bad_value("key", "x" * 5000, "short", "less"))) < 200
    assert shown({1, 2}).startswith("{1")


def test_nearest():
    assert nearest("Time-Out", ["timeout_s", "slices"]) == "timeout_s"
    assert nearest("zzz", ["timeout_s", "slices"]) is None


BIG, EXACT = 10**400, 2**53  # JSON has no limit
CACHE = {"enabled": True, "disk_path": "cache/"}
BLOCKS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "token_pipeline.timeout_s": ({}, [BIG]),
    "token_pipeline.slices": ({}, [10**300, BIG, EXACT + 1, [1, 10**300]]),
    "token_pipeline.granularity": ({}, [10**300, BIG, EXACT + 1]),
    "token_pipeline.memory_gb": ({}, [10**300, BIG, 1e308, 1.1e9]),
    "token_pipeline.trace_steps": ({"trace_path": "trace.json"}, [[1, BIG]]),
    "token_pipeline.trace_path": ({}, ["a\0b", "\ud800"]),
    "token_pipeline.plan_path": ({}, ["a\0b", "\ud800"]),
    "token_pipeline.measurements_path": ({}, ["a\0b", "\ud800"]),
    "elastic_pipeline.freeze.alpha": ({"policy": "alpha"}, [BIG]),
    "elastic_pipeline.freeze.interval": ({"policy": "alpha"}, [10**300, BIG]),
    "elastic_pipeline.freeze.patience": ({"policy": "plateau"}, [10**300, BIG]),
    "elastic_pipeline.freeze.frozen_layers": ({"policy": "schedule"}, [[[10**300, 1]], [[1, BIG]]]),
    "elastic_pipeline.resize.policy": ({}, [[[BIG, 1]]]),
    "elastic_pipeline.resize.memory_gb": ({}, [BIG, 1e308]),
    "elastic_pipeline.cache.memory_gb": (CACHE, [BIG, 1e308]),
    "elastic_pipeline.cache.disk_gb": (CACHE, [BIG, 1e308]),
    "elastic_pipeline.cache.disk_path": (CACHE, ["a\0b", "\ud800"]),
    "elastic_pipeline.data.seed": ({}, [10**300, BIG, 2**63]),
    "elastic_pipeline.history_path": ({}, ["a\0b", "\ud800"]),
}


@pytest.mark.parametrize("path", BLOCKS)
def test_what_nothing_can_hold_is_refused(path: str) -> None:
    from ds_terapipe.elastic import settings

    beside, values = BLOCKS[path]
    for value in values:
        block, *names = path.split(".")
        config: Any = {**beside, names.pop(): value}
        for name in reversed(names):
            config = {name: config}
        with pytest.raises(ConfigError, match=rf"^{re.escape(path)}: got .*, must be .*, use ") as caught:
            parse({block: config})
            settings.parse({block: config})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["lr", "eps", "weight_decay", "max_grad_norm", "min_coeff", "max_coeff", "weight_norm_clip"]
)
def test_so_it_is_for_the_optimizer(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{name}: got 1000+"):
        FusedLamb([torch.nn.Parameter(torch.zeros(2))], **{name: BIG})


@pytest.mark.parametrize("name", ["reference_lr", "reference_batch_size", "total_steps", "warmup_ratio"])
def test_and_for_schedulers(name: str) -> None:
    from ds_terapipe.optim.schedules.lr_schedules import LambWarmup

    params = {"reference_lr": 1e-3, "reference_batch_size": 32, "total_steps": 10, "warmup_ratio": 0.1}
    for value in (BIG, 10**300) if name != "reference_lr" else (BIG,):
        with pytest.raises(ConfigError, match=rf"{name}: got 1000+"):
            LambWarmup.checked({**params, name: value})
