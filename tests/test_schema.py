"""The JSON schema for editors takes what the parsers take, and refuses what they refuse of single keys."""

import json
from typing import Any

import fastjsonschema
import pytest

from ds_terapipe import cli
from ds_terapipe.commands.schema import schema
from ds_terapipe.config import parse as parse_tokens
from ds_terapipe.elastic.settings import parse as parse_layers
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import TYPES
from ds_terapipe.optim.json_keys import read as read_lamb

from .programs import ROOT
from .shown import blocks

# as an editor reads it: tuples are lists
validate = fastjsonschema.compile(json.loads(json.dumps(schema())))
GOOD = [
    *({"token_pipeline": block} for block in ({}, {"slices": [8, 4]}, {"memory_gb": 2.5}, {"schedule": "zero_bubble"},
      {"cut": {"inputs": [1, None, [2, 3]]}}, {"trace_path": "t", "trace_steps": [1, 1]}, {"timeout_s": 31536000},
      {"enabled": False, "slice": -1})),
    *({"elastic_pipeline": block} for block in ({}, {"freeze": {"policy": "schedule", "frozen_layers": [[10, 2], [20, 4]]}},
      {"freeze": {"policy": "alpha", "unfreeze": ["loss_rise"], "interval": 5}}, {"resize": {"policy": [[0, 2]]}},
      {"cache": {"enabled": True, "disk_path": "c", "disk_gb": 1}}, {"data": {"seed": 0}})),
    {"optimizer": {"type": "FusedLamb", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "mode": "apex"}}},
    {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "train_batch_size": 2},
]  # fmt: skip
BAD = [
    *({"token_pipeline": block} for block in ({"slice": 4}, {"slices": 0}, {"slices": True}, {"slices": []}, {"schedule": "zb"},
      {"cut": {"input": [1]}}, {"timeout_s": 0}, {"memory_gb": "2"}, {"verify": None}, 4, None, [8])),
    *({"elastic_pipeline": block} for block in ({"freeze": {"alpha": 1}}, {"freeze": {"frozen_layers": [[10]]}},
      {"resize": {"policy": "half"}}, {"freeze": {"unfreeze": ["never"]}}, {"cache": {"enable": True}}, {"data": {"seed": -1}})),
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
    for config in [*GOOD, *map(json.loads, files), *(json.loads(block.text) for block in blocks("json"))]:
        parse(config)
        validate(config)


@pytest.mark.parametrize("config", BAD, ids=str)
def test_a_key_that_does_not_parse_does_not_fit(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse(config)
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        validate(config)


def test_the_command_prints_it_with_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0 and json.loads(out := capsys.readouterr().out) == json.loads(json.dumps(schema()))
    assert '"description": "The order of the work.' in out and out.count('"title"') == 1
