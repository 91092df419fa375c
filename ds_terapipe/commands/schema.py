"""Print the JSON schema of our keys in ds_config.json, for editors.

Print a JSON schema of this package's keys in ds_config.json. It accepts DeepSpeed's own keys. It has no rules between
keys: a training checks them at its start.

example:
  ds_terapipe schema                                        print the schema
  ds_terapipe schema --output ds_config.schema.json         write a file for an editor

VS Code reads it with {"json.schemas": [{"fileMatch": ["ds_config*.json"], "url": "./ds_config.schema.json"}]} in its settings.
"""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from ds_terapipe.blocks import Block
from ds_terapipe.commands.output import write_text
from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.docstrings import entries, summary
from ds_terapipe.elastic.settings import ElasticPipelineConfig
from ds_terapipe.optim.schedules.keys import MixedBatchKeys, WarmupKeys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("--output", metavar="FILE", help="write the schema to a file, in place of printing it")


def run(options: argparse.Namespace) -> None:
    """Print the schema, or write it."""
    text = json.dumps(schema(), indent=2)
    if not options.output:
        print(text)
        return
    write_text("--output", options.output, text + "\n")
    print(f"written to {options.output}")


def schema() -> dict[str, Any]:
    """Return the schema of a whole ``ds_config.json``, in which all other keys are free."""
    blocks: tuple[type[Block], ...] = (TokenPipelineConfig, ElasticPipelineConfig)
    schedules: dict[str, type[Block]] = {"LambWarmup": WarmupKeys, "MixedBatch": MixedBatchKeys}
    named = [(block, "validation") for block in (*blocks, *schedules.values())]
    _, made = models_json_schema(named, ref_template="#/definitions/{model}")  # type: ignore[arg-type]
    off = {"properties": {"enabled": {"const": False}}, "required": ["enabled"]}
    properties = {
        # a block that is switched off is not read
        block.PATH: {
            "description": summary(block).replace("``", ""),
            "type": "object",
            "if": off,
            "else": _reference(block),
        }
        for block in blocks
    }
    scheduler = [_for_type(kind, _reference(block)) for kind, block in schedules.items()]
    whole: dict[str, Any] = _draft_7(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": "ds_config.json: keys of ds_terapipe",
            "type": "object",
            "properties": {**properties, "optimizer": _lamb(), "scheduler": {"allOf": scheduler}},
            "definitions": made["$defs"],
        }
    )
    return whole


def lamb_keys() -> dict[str, tuple[Any, str]]:
    """Return the keys of ``optimizer.params`` for ``FusedLamb``: each one's default, and its text."""
    from ds_terapipe.optim.lamb import FusedLamb

    texts, found = entries(FusedLamb, "Args"), inspect.signature(FusedLamb).parameters
    return {
        name: (found[name].default, texts[name]) for name in found if name not in ("params", "tensor_parallel_group")
    }


def _lamb() -> dict[str, Any]:
    """Return the schema of ``optimizer``, which counts for our type alone."""
    from ds_terapipe.optim.modes import SETTINGS

    keys = {
        name: {**TypeAdapter(SETTINGS[name].kind).json_schema(), "default": default, "description": _plain(text)}
        for name, (default, text) in lamb_keys().items()
    }
    return _for_type("FusedLamb", {"type": "object", "properties": keys, "additionalProperties": False})


def _draft_7(schema: Any) -> Any:
    """Spell the items of a tuple as editors know them: pydantic writes a later draft."""
    if isinstance(schema, dict):
        return {"items" if key == "prefixItems" else key: _draft_7(value) for key, value in schema.items()}
    return [_draft_7(each) for each in schema] if isinstance(schema, list) else schema


def _reference(block: type[Block]) -> dict[str, Any]:
    return {"$ref": f"#/definitions/{block.__name__}"}


def _for_type(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a block ``type`` and ``params``, which says nothing of other types."""
    is_it = {"properties": {"type": {"const": name}}, "required": ["type"]}
    return {"if": is_it, "then": {"properties": {"params": params}}}


def _plain(text: str) -> str:
    return text.replace("``", "").replace("\\|", "|")
