"""The keys of ds_config.json: defaults, what is accepted, and the one line that every mistake gets."""

import os
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ds_terapipe.config import TokenPipelineConfig, parse
from ds_terapipe.elastic import settings
from ds_terapipe.errors import LARGEST_COUNT, ConfigError
from tests.json_values import JSON
from tests.schedule.strategies import SCHEDULES


def parsed(**block):
    return parse({"train_batch_size": 1, "token_pipeline": block})


def test_absent_and_disabled_blocks_are_the_same_and_tuples_lists():
    assert parse({"train_batch_size": 1}) is None and parsed(enabled=False) is None
    assert parsed(enabled=False, slices="nonsense", colour="red") is None
    assert parsed(slices=(3, 2)).slices == [3, 2]


SLICES = 'must be a positive number, a list of lengths or "auto"'
EXACT, HUGE, BIG = 2**53 + 1, 10**300, 10**400  # JSON has no limit
ELASTIC, CACHE = "elastic_pipeline.", {"enabled": True, "disk_path": "cache/"}
# key, value, message behind the key (or in it); what stands beside the key
REFUSED: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("slices", -3, f"got -3, {SLICES}, use e.g. 8", {}), ("slices", 2.5, f"got 2.5, {SLICES}", {}),
    ("slices", True, f"got true, {SLICES}", {}), ("slices", "8", f'got "8", {SLICES}, use e.g. 8', {}),
    ("slices", [3, -1], f"got [3, -1], {SLICES}", {}), ("slices", [1, True], f"got [1, true], {SLICES}", {}),
    ("granularity", 0, "got 0, must be a positive number of tokens", {}),
    ("granularity", 8, "got 8, must be absent beside slices that are", {"slices": 8}),
    ("memory_gb", -1, "got -1, must be a positive number", {}),
    ("plan_path", "plan.json", 'got "plan.json", must be absent beside slices', {"slices": 8}),
    ("schedule", "1F1b", f'"auto" or {SCHEDULES} or "interleaved", use "1f1b"', {"slices": 8}),
    ("schedule", "interleaved", 'must be "1f1b" with one stage on each place', {"slices": 8}),
    ("stages_per_place", 0, "got 0, must be a positive number of stages", {"slices": 8}),
    ("placement", "v", "unless each place has two stages", {"slices": 8, "stages_per_place": 3}),
    ("weight_gradients", "once", '"micro_batch" or "slice"', {"slices": 8}),
    ("layout", "bs_h", '"auto" or "bsh" or "sbh", use "bsh"', {"slices": 8}),
    ("verify", 1, "got 1, must be true or false", {"slices": 8}),
    ("timeout_s", 0, "got 0, must be a positive number of seconds", {"slices": 8}),
    ("timeout_s", 31536001, "at most 31536000, use e.g. 600", {"slices": 8}),
    ("trace_path", "", 'got "", must be the name of a file, use "trace.json"', {"slices": 8}),
    ("trace_steps", [2, 3], "got [2, 3], must be absent without trace_path", {}),
    ("trace_steps", [0, 4], "counted from 1", {"slices": 8}), ("cut", [1], "got [1], must be", {"slices": 8}),
    ("cut", {"imputs": [1]}, 'token_pipeline.cut: unknown key "imputs"', {"slices": 8}),
    ("cut.inputs", 1, "got 1, must be a list with one entry per tensor", {}),
    ("cut.labels", [0], "0 is the batch", {}), ("cut.inputs", [[1, 1]], "got [[1, 1]]", {}),
    ("slices", EXACT, f"got {EXACT}, must be", {}), ("slices", [1, HUGE], "got [1, 1000", {}),
    ("granularity", EXACT, f"got {EXACT}, must be", {}), ("memory_gb", 1.1e9, "got 1100000000", {}),
    ("trace_steps", [1, BIG], "got [1, 1000", {"trace_path": "trace.json"}),
    (f"{ELASTIC}freeze.alpha", BIG, "got 1000", {"policy": "alpha"}),
    (f"{ELASTIC}freeze.interval", HUGE, "got 1000", {"policy": "alpha"}),
    (f"{ELASTIC}freeze.frozen_layers", [[HUGE, 1]], "got [[1000", {"policy": "schedule"}),
    (f"{ELASTIC}freeze.frozen_layers", [[1, BIG]], "got [[1, 1000", {"policy": "schedule"}),
    (f"{ELASTIC}resize.policy", [[BIG, 1]], "got [[1000", {}), (f"{ELASTIC}data.seed", 2**63, "got 9223372036854775808", {}),
    (f"{ELASTIC}cache.disk_gb", BIG, "got 1000", CACHE), (f"{ELASTIC}cache.disk_path", "a\0b", "got", CACHE),
    (f"{ELASTIC}cache.disk_path", "\ud800", "got", CACHE),
    ("time-out-s", 3, 'use "timeout_s"', {}), ("xyzzy", 3, "slices, schedule", {}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "says", "beside"), REFUSED)
def test_mistakes_are_one_line_with_key_value_and_rule(key, value, says, beside):
    path = key if key.startswith(ELASTIC) else f"token_pipeline.{key}"
    block, *names = path.split(".")
    config: Any = {**beside, names.pop(): value}
    for name in reversed(names):
        config = {name: config}
    with pytest.raises(ConfigError) as caught:
        parse({block: config})
        settings.parse({block: config})
    message = str(caught.value)
    assert says in message and "\n" not in message and ", use " in message
    assert message.startswith(f"{path}: got " if "unknown key" not in message else "token_pipeline")


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
