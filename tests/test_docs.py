"""What README.md and docs/*.md show is run as it stands there: imports, JSON, commands, Python, names, files and links.

Every fenced block and every span of code has to be of a known kind. A new block of a new kind fails here until somebody
says what it is.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import ds_terapipe
from ds_terapipe import autoload, config
from ds_terapipe.elastic import settings as elastic
from ds_terapipe.elastic.policies.freeze import policy_names
from ds_terapipe.elastic.policies.freezer import REASONS
from ds_terapipe.optim import modes
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.optim.op import backends
from ds_terapipe.schedule import NAMES

from .documents import ROOT, Piece, take_apart
from .shown import (
    BROKEN_IMPORTS,
    MEGATRON_DEEPSPEED,
    at,
    block_kind,
    blocks,
    is_json,
    run_python,
    shown,
    span_kind,
    spans,
)
from .spawn import run_ranks

ENGINES = {"elastic_pipeline": "ElasticPipelineEngine", "token_pipeline": "TokenPipelineEngine"}


def test_everything_is_of_a_known_kind() -> None:
    block_kinds = Counter(map(block_kind, shown().blocks))
    span_kinds = Counter(map(span_kind, shown().spans))
    assert set(block_kinds) == {"json", "python", "shell", "output"}, block_kinds
    assert set(span_kinds) == {
        "place", "theirs", "import", "command", "option", "json", "action", "file", "name",
    }, span_kinds  # fmt: skip


def test_what_is_odd_is_not_passed_over() -> None:
    with pytest.raises(pytest.fail.Exception, match="unknown kind"):
        block_kind(Piece("README.md", 1, "training:\n  slices: 4", "yaml"))
    with pytest.raises(pytest.fail.Exception, match="unknown kind"):
        block_kind(Piece("README.md", 1, "some words"))
    with pytest.raises(pytest.fail.Exception, match="unknown kind"):
        span_kind(Piece("README.md", 1, "two words"))
    for text in ("```json\n{}\n", "a `word\n", "a `word`` b\n"):
        with pytest.raises(ValueError, match="odd back-quote"):
            take_apart(text, "README.md")


# -------------------------------------------------------------------------------------------------------------- imports


def test_imports_are_executed(tmp_path: Path) -> None:
    """Statements as they stand, and one for each ``ds_terapipe.<name>`` that the text shows."""
    statements = {span.text: span for span in spans("import")}
    ours = {}
    for span in spans("name"):
        if span.text.startswith("ds_terapipe."):
            module, _, name = span.text.partition("(")[0].rpartition(".")
            ours[f"from {module} import {name}"] = span
    assert "from ds_terapipe import FusedLamb" in ours
    program = f"""
import json
failed = {{}}
for statement in {list({**statements, **ours})!r}:
    try:
        exec(statement, {{}})
    except ImportError as error:
        failed[statement] = str(error)
print(json.dumps(failed))
"""
    done = run_python(program, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    failed = json.loads(done.stdout.splitlines()[-1])
    expected = {
        text for text in statements if text in BROKEN_IMPORTS and statements[text].document == MEGATRON_DEEPSPEED
    }
    assert set(failed) == expected, {text: ({**statements, **ours}[text].where, failed.get(text)) for text in failed}
    assert len(expected) == len(BROKEN_IMPORTS)


def test_python_blocks_run(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda block: run_python(block.text, tmp_path), blocks("python")))
    for block, done in zip(blocks("python"), ended, strict=True):
        assert done.returncode == 0, f"{block.where}\n{done.stderr[-3000:]}"


# ----------------------------------------------------------------------------------------------------------------- JSON


@functools.cache
def deepspeeds_words() -> frozenset[str]:
    """Values of the constants with which DeepSpeed names keys, and fields of the classes for its blocks."""
    modules = [importlib.import_module(f"deepspeed.runtime.{name}") for name in ("constants", "config", "zero.config")]
    words = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    for module in modules:
        for value in vars(module).values():
            words.update(getattr(value, "model_fields", ()))
    return frozenset(words)


def check_top_level(settings: Mapping[str, Any]) -> None:
    """DeepSpeed passes over a top-level key that it doesn't know, and so would a test."""
    unknown = [key for key in settings if key not in deepspeeds_words() and key not in autoload.KEYS]
    assert not unknown, f"neither DeepSpeed nor ds_terapipe has the key {unknown}"


def train_on(rank: int, world_size: int, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One training step of a small GPT with each configuration; what was built, and the loss."""
    from deepspeed.pipe import PipelineModule

    from .pipeline.models import gpt, mean_loss, micro_batch

    seen = []
    for settings in blocks:
        model = PipelineModule(gpt(2), num_stages=1, loss_fn=mean_loss)
        given = {} if "optimizer" in settings else {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        parameters = list(model.parameters())
        engine, optimizer, _, scheduler = ds_terapipe.initialize(
            model=model, model_parameters=parameters, config=settings, **given
        )
        rows = engine.train_micro_batch_size_per_gpu()
        batches = [micro_batch(n, length=24, batch=rows, masked=False) for n in range(engine.micro_batches)]
        loss = float(engine.train_batch(iter(batches)))
        kinds = [type(thing).__name__ for thing in (engine, getattr(optimizer, "optimizer", optimizer), scheduler)]
        seen.append({"kinds": kinds, "loss": loss, "groups": len(engine.optimizer.param_groups)})
    return seen


def test_json_blocks_train() -> None:
    """Through the package's own way in, as they stand; a block that has no batch size is shown beside the reader's own."""
    found = blocks("json")
    settings = []
    for block in found:
        with at(block):
            keys = json.loads(block.text, object_pairs_hook=no_duplicates)
            check_top_level(keys)
            batch = {} if any("batch" in key for key in keys) else {"train_batch_size": 2}
            settings.append({**batch, **keys})
    (seen,) = run_ranks(train_on, 1, settings)
    assert all(any(key in each for each in settings) for key in (*ENGINES, "optimizer"))
    for block, keys, built in zip(found, settings, seen, strict=True):
        engine, optimizer, scheduler = built["kinds"]
        assert engine == next((kind for key, kind in ENGINES.items() if key in keys), "PipelineEngine"), block.where
        assert optimizer == keys.get("optimizer", {"type": "SGD"})["type"], block.where
        assert scheduler == keys.get("scheduler", {"type": "NoneType"})["type"], block.where
        assert 0 < built["loss"] < 10, block.where


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key twice in {keys}"
    return dict(pairs)


@functools.cache
def lamb_settings() -> dict[str, inspect.Parameter]:
    """``optimizer.params`` of FusedLamb, as the signature has them."""
    return {
        name: parameter
        for name, parameter in inspect.signature(FusedLamb).parameters.items()
        if name not in ("params", "tensor_parallel_group")
    }


def known_values() -> set[str]:
    """Words in quotation marks that are a value of some key or the name of a type."""
    values = {*NAMES, *backends.NAMES, *get_args(config.Layout), *get_args(config.WeightGradients)}
    return (
        values
        | {name for names in autoload.TYPES.values() for name in names}
        | set(modes.MODES)
        | set(policy_names())
        | set(REASONS)
        | {"bias_norm", "Lamb", "epoch", "off", "halve", "measured", "as_launched", "exact", "bf16"}
    )


def test_json_in_the_text() -> None:
    """Values, and ``"key": value`` of any block."""
    pairs = 0
    for span in spans("json"):
        with at(span):
            if is_json(span.text):
                value = json.loads(span.text)
                if isinstance(value, dict):
                    config.parse({"token_pipeline": {"cut": value}})
                assert not isinstance(value, str) or value in known_values(), f"no key has the value {value!r}"
                continue
            pair = json.loads("{" + span.text + "}", object_pairs_hook=no_duplicates)
            pairs += 1
            if set(pair) <= set(elastic.ElasticPipelineConfig.model_fields) - {"enabled"}:
                elastic.parse({"elastic_pipeline": pair})
            elif set(pair) <= set(lamb_settings()):
                FusedLamb([torch.nn.Parameter(torch.zeros(1))], **pair)
            else:
                config.parse({"token_pipeline": pair})
    assert pairs >= 3


def table(first_key: str, document: str) -> list[tuple[list[str], str]]:
    """Rows of the table that begins with this key: the keys of a row, and its cell of defaults."""
    text = (ROOT / document).read_text(encoding="utf-8")
    (found,) = [
        part for part in re.split(r"\n(?!\|)", text) if re.search(rf"^\|---.*\n\| `{first_key}`", part, re.MULTILINE)
    ]
    rows = re.sub(r"\A.*?\n\|---[^\n]*\n", "", found, flags=re.DOTALL).splitlines()
    cells = [row.strip("|").split(" | ") for row in rows]
    return [(re.findall(r"`([^`]+)`", row[0]), row[1]) for row in cells]


def default_of(cell: str, number: int) -> Any:
    """The ``number``-th default in a cell, where it is given as code; else None, and a word says what holds."""
    given = re.findall(r"`([^`]+)`", cell)
    return json.loads(given[number]) if given else None


def test_the_table_of_token_pipeline_has_every_key_and_its_default() -> None:
    rows = table("enabled", "docs/token_slices.md")
    assert sorted(key for keys, _ in rows for key in keys) == sorted(config.TokenPipelineConfig.model_fields)
    for keys, cell in rows:
        for number, key in enumerate(keys):
            assert config.TokenPipelineConfig.model_fields[key].default == default_of(cell, number), key


def test_the_table_of_elastic_pipeline_has_every_key_and_its_default() -> None:
    defaults: dict[str, Any] = {}
    for block, value in elastic.ElasticPipelineConfig().model_dump(mode="json").items():
        keys = isinstance(value, dict)
        defaults.update({block: value} if not keys else {f"{block}.{key}": v for key, v in value.items()})
    assert {"enabled", "freeze.alpha", "resize.policy"} <= set(defaults)
    rows = table("enabled", "docs/elastic.md")
    assert {key: default_of(cell, 0) for (key,), cell in rows} == defaults


def test_the_table_of_fused_lamb_has_keys_of_its_own_and_their_defaults() -> None:
    rows = table("lr", "docs/lamb.md")
    assert {"lr", "betas", "mode", "exclude", "max_grad_norm"} <= {key for keys, _ in rows for key in keys}
    for keys, cell in rows:
        for number, key in enumerate(keys):
            default = lamb_settings()[key].default
            assert (list(default) if isinstance(default, tuple) else default) == default_of(cell, number), key
