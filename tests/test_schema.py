"""The JSON schema for editors takes what the parsers take, and refuses what they refuse of single keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_terapipe import cli
from ds_terapipe.commands.schema import schema
from ds_terapipe.config import parse as parse_tokens
from ds_terapipe.elastic.settings import parse as parse_layers
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import TYPES
from ds_terapipe.optim.json_keys import read as read_lamb

from .documents import ROOT
from .shown import blocks

KINDS = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
LIMITS = {
    "minimum": lambda value, limit: value >= limit, "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit, "exclusiveMaximum": lambda value, limit: value < limit,
    "minItems": lambda value, limit: len(value) >= limit, "maxItems": lambda value, limit: len(value) <= limit,
}  # fmt: skip


def fits(value: Any, rule: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a JSON value fits a schema: what a validator does, for the words that are used here."""
    if "$ref" in rule:
        return fits(value, root["definitions"][rule["$ref"].rpartition("/")[2]], root)
    kind = KINDS.get(rule.get("type", ""), object)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, (int, float))):
        return rule.get("type") == "null" and value is None
    if rule.get("type") == "null" and value is not None:
        return False
    if value not in rule.get("enum", [value]) or value != rule.get("const", value):
        return False
    if not all(check(value, rule[word]) for word, check in LIMITS.items() if word in rule):
        return False
    known, items = rule.get("properties", {}), rule.get("items", {})
    if isinstance(value, dict):
        unknown = rule.get("additionalProperties") is False and value.keys() - known.keys()
        if unknown or set(rule.get("required", ())) - value.keys():
            return False
        if not all(fits(value[name], each, root) for name, each in known.items() if name in value):
            return False
    if isinstance(value, list):
        each = items if isinstance(items, list) else [items] * len(value)
        if not all(fits(item, one, root) for item, one in zip(value, each, strict=False)):
            return False
    branch = rule.get("then" if fits(value, rule["if"], root) else "else") if "if" in rule else None
    some = "anyOf" not in rule or any(fits(value, each, root) for each in rule["anyOf"])
    return some and all(fits(value, each, root) for each in (branch, *rule.get("allOf", ())) if each)


GOOD = [
    *({"token_pipeline": block} for block in ({}, {"slices": [8, 4]}, {"memory_gb": 2.5}, {"schedule": "zero_bubble"},
      {"cut": {"inputs": [1, None, [2, 3]]}}, {"trace_path": "t", "trace_steps": [3, 5]}, {"enabled": False, "slice": -1})),
    *({"elastic_pipeline": block} for block in ({}, {"freeze": {"policy": "schedule", "frozen_layers": [[10, 2], [20, 4]]}},
      {"freeze": {"policy": "alpha", "unfreeze": ["loss_rise"], "interval": 5}}, {"resize": {"policy": [[0, 2]]}},
      {"cache": {"enabled": True, "disk_path": "c", "disk_gb": 1}}, {"data": {"seed": 0}})),
    {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "mode": "apex"}}},
    {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "train_batch_size": 2},
]  # fmt: skip
BAD = [
    *({"token_pipeline": block} for block in ({"slice": 4}, {"slices": 0}, {"slices": True}, {"slices": []}, {"schedule": "zb"},
      {"cut": {"input": [1]}}, {"timeout_s": 0}, {"memory_gb": "2"}, {"verify": None}, 4)),
    *({"elastic_pipeline": block} for block in ({"freeze": {"alpha": 1}}, {"freeze": {"frozen_layers": [[10]]}},
      {"resize": {"policy": "half"}},
      {"freeze": {"unfreeze": ["never"]}}, {"cache": {"enable": True}}, {"data": {"seed": -1}})),
    {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-3, "beta": 0.9}}},
    {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-3, "mode": "papers"}}},
    {"scheduler": {"type": "LambWarmup", "params": {"reference_lr": 1e-3}}},
]  # fmt: skip


def parse(config: dict[str, Any]) -> None:
    """All of our parsers, as ``initialize`` calls them."""
    parse_tokens(config)
    parse_layers(config)
    ours = {name: config.get(name, {}).get("type") in TYPES[name] for name in TYPES}
    read_lamb({"optimizer": {"type": "AdamW"}, **config}, {}, **ours)


def test_what_parses_fits() -> None:
    files = [path.read_text() for folder in ("configs", "examples") for path in (ROOT / folder).glob("*.json")]
    whole = json.loads(json.dumps(schema()))  # as an editor reads it: tuples are lists
    for config in [*GOOD, *map(json.loads, files), *(json.loads(block.text) for block in blocks("json"))]:
        parse(config)
        assert fits(config, whole, whole), config


@pytest.mark.parametrize("config", BAD, ids=str)
def test_a_key_that_does_not_parse_does_not_fit(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse(config)
    assert not fits(config, schema(), schema())


def test_the_command_prints_it_with_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    made = json.loads(capsys.readouterr().out)
    properties = [each["properties"] for each in made["definitions"].values()]
    properties.append(made["properties"]["optimizer"]["then"]["properties"]["params"]["properties"])
    assert all(
        key["description"][0] not in " a" and ". Must be" in key["description"]
        for each in properties[:-1]
        for key in each.values()
    )
    assert {"slices", "frozen_layers", "mode"} <= {name for each in properties for name in each}
    assert all(key["description"] for key in properties[-1].values())
