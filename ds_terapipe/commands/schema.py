"""``ds_terapipe schema``: the JSON schema of our keys in ``ds_config.json``, for editors."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Collection
from types import UnionType
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from ds_terapipe.blocks import Block
from ds_terapipe.commands.output import write_text
from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.docstrings import entries, summary
from ds_terapipe.elastic.settings import ElasticPipelineConfig

HELP = "print the JSON schema of our keys in ds_config.json, for editors"
DESCRIPTION = (
    "Print a JSON schema of this package's keys in ds_config.json. It accepts DeepSpeed's own keys. It has no "
    "rules between keys: a training checks them at its start."
)
EXAMPLE = """\
example:
  ds_terapipe schema                                        print the schema
  ds_terapipe schema --output ds_config.schema.json         write a file for an editor

VS Code reads it with {"json.schemas": [{"fileMatch": ["ds_config*.json"], "url": "./ds_config.schema.json"}]} in its settings.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("--output", metavar="FILE", help="write the schema to a file, and print nothing")


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
    named = [(block, "validation") for block in blocks]
    _, made = models_json_schema(named, ref_template="#/definitions/{model}")  # type: ignore[arg-type]
    off = {"properties": {"enabled": {"const": False}}, "required": ["enabled"]}
    properties = {
        # a block that is switched off is not read
        block.PATH: {
            "description": summary(block).replace("``", ""),
            "type": "object",
            "if": off,
            "else": {"$ref": f"#/definitions/{block.__name__}"},
        }
        for block in blocks
    }
    whole: dict[str, Any] = _draft_7(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": "ds_config.json: keys of ds_terapipe",
            "type": "object",
            "properties": {**properties, "optimizer": _lamb(), "scheduler": {"allOf": [_warmup(), _mixed_batch()]}},
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
    from torch import Tensor

    from ds_terapipe.optim.lamb import FusedLamb
    from ds_terapipe.optim.modes import EXCLUDES, MODES
    from ds_terapipe.optim.op import backends

    words = {"mode": list(MODES), "exclude": list(EXCLUDES), "backend": list(backends.NAMES)}
    types = get_type_hints(FusedLamb.__init__)
    keys = {}
    for name, (default, text) in lamb_keys().items():
        kinds = get_args(types[name]) if isinstance(types[name], UnionType) else [types[name]]
        kinds = [TypeAdapter(kind).json_schema() for kind in kinds if kind is not Tensor]
        kind = {"enum": words[name]} if name in words else {"anyOf": kinds}
        keys[name] = {**kind, "default": default, "description": _plain(text)}
    return _for_type("FusedLamb", keys, ())


def _draft_7(schema: Any) -> Any:
    """Spell the items of a tuple as editors know them: pydantic writes a later draft."""
    if isinstance(schema, dict):
        return {"items" if key == "prefixItems" else key: _draft_7(value) for key, value in schema.items()}
    return [_draft_7(each) for each in schema] if isinstance(schema, list) else schema


def _warmup() -> dict[str, Any]:
    from ds_terapipe.optim.schedules.lr_schedules import LambWarmup

    texts = entries(LambWarmup, "Args")
    keys = {name: {"description": _plain(texts[name])} for name in LambWarmup.KEYS}
    return _for_type("LambWarmup", keys, LambWarmup.REQUIRED)


def _mixed_batch() -> dict[str, Any]:
    from ds_terapipe.optim.schedules.mixed_batch import MixedBatch
    from ds_terapipe.optim.schedules.phases import REQUIRED

    keys = {name: {"description": _plain(text)} for name, text in entries(MixedBatch, "Keys of a phase").items()}
    phases = {"type": "array", "minItems": 1, "items": _object(keys, REQUIRED)}
    return _for_type("MixedBatch", {"phases": phases}, ("phases",))


def _for_type(name: str, keys: dict[str, Any], required: Collection[str]) -> dict[str, Any]:
    """Return the schema of a block ``type`` and ``params``, which says nothing of other types."""
    is_it = {"properties": {"type": {"const": name}}, "required": ["type"]}
    return {"if": is_it, "then": {"properties": {"params": _object(keys, required)}}}


def _object(keys: dict[str, Any], required: Collection[str]) -> dict[str, Any]:
    return {"type": "object", "properties": keys, "required": list(required), "additionalProperties": False}


def _plain(text: str) -> str:
    return text.replace("``", "").replace("\\|", "|")
