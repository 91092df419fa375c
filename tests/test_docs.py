"""README.md and docs/*.md show code that runs as it stands there: imports, Python, JSON, and tables of keys.

Every fenced block and every span of code has to be of a known kind. A new block of a new kind fails here until its kind is added.
"""

import functools
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import ds_terapipe
from ds_terapipe import autoload, config
from ds_terapipe.commands.schema import lamb_keys
from ds_terapipe.elastic import settings as elastic
from ds_terapipe.optim.lamb import FusedLamb

from .shown import BROKEN_IMPORTS, MEGATRON_DEEPSPEED, at, block_kind, blocks, is_json, shown, sources, span_kind, spans
from .spawn import run_ranks, run_script

ENGINES = {"elastic_pipeline": "ElasticPipelineEngine", "token_pipeline": "TokenPipelineEngine"}
_WITH_KEYS = ("runtime.constants", "runtime.config", "runtime.zero.config", "monitor.config")
HOOK = "import torch\ntorch._import_device_backends()\n"


def test_everything_is_of_a_known_kind() -> None:
    assert set(map(block_kind, shown().blocks)) == {"json", "python", "shell", "output", "picture"}
    kinds = {"place", "theirs", "import", "command", "option", "json", "action", "file", "name"}
    assert set(map(span_kind, shown().spans)) == kinds


def test_imports_are_executed(tmp_path: Path) -> None:
    """Statements as they stand, and one for each ``ds_terapipe.<name>`` that the text shows."""
    statements = {span.text: span for span in spans("import")}
    for span in spans("name"):
        if span.text.startswith("ds_terapipe."):
            module, _, name = span.text.partition("(")[0].rpartition(".")
            statements.setdefault(f"from {module} import {name}", span)
    assert "from ds_terapipe import FusedLamb" in statements
    broken = [text for text in BROKEN_IMPORTS if statements[text].document == MEGATRON_DEEPSPEED]
    assert len(broken) == len(BROKEN_IMPORTS)
    program = f"""
failed = {{}}
for statement in {list(statements)!r}:
    try:
        exec(statement, {{}})
    except ImportError as error:
        failed[statement] = str(error)
assert set(failed) == set({broken!r}), failed
"""
    end = run_script(HOOK + program, tmp_path)
    assert end.code == 0, end.output[-3000:]


def test_python_blocks_run(tmp_path: Path) -> None:
    for block in blocks("python"):
        end = run_script(HOOK + block.text, tmp_path)
        assert end.code == 0, f"{block.where}\n{end.output[-3000:]}"


@functools.cache
def deepspeeds_words() -> frozenset[str]:
    """Values of the constants with which DeepSpeed names keys, and fields of the classes for its blocks."""
    modules = [importlib.import_module(f"deepspeed.{name}") for name in _WITH_KEYS]
    values = [value for module in modules for value in vars(module).values()]
    fields = [field for value in values for field in getattr(value, "model_fields", ())]
    return frozenset([*fields, *(value for value in values if isinstance(value, str))])


def train_on(rank: int, world_size: int, blocks: list[dict[str, Any]]) -> list[tuple[list[str], float]]:
    """One training step of a small GPT with each configuration; what was built, and the loss."""
    from deepspeed.pipe import PipelineModule

    from .pipeline.models import gpt, mean_loss, micro_batch

    seen = []
    for settings in blocks:
        model = PipelineModule(gpt(8), num_stages=1, loss_fn=mean_loss)
        given = {} if "optimizer" in settings else {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        parameters = list(model.parameters())
        engine, optimizer, _, scheduler = ds_terapipe.initialize(
            model=model, model_parameters=parameters, config=settings, **given
        )
        if hasattr(scheduler, "register_dataset"):
            scheduler.register_dataset(SimpleNamespace(set_seq_length=int))
        rows = engine.train_micro_batch_size_per_gpu()
        batches = [micro_batch(n, length=24, batch=rows, masked=False) for n in range(engine.micro_batches)]
        loss = float(engine.train_batch(iter(batches)))
        things = (engine, getattr(optimizer, "optimizer", optimizer), scheduler)
        seen.append(([type(thing).__name__ for thing in things], loss))
    return seen


def test_json_blocks_train() -> None:
    """Through the package's own way in, as they stand; a block that has no batch size is shown beside the reader's own."""
    settings = []
    for block in blocks("json"):
        with at(block):
            keys = json.loads(block.text, object_pairs_hook=no_duplicates)
            # DeepSpeed passes over a top-level key that it doesn't know, and so would a test
            unknown = [key for key in keys if key not in deepspeeds_words() and key not in autoload.KEYS]
            assert not unknown, f"neither DeepSpeed nor ds_terapipe has the key {unknown}"
            settings.append({**({} if any("batch" in key for key in keys) else {"train_batch_size": 2}), **keys})
    assert all(any(key in each for each in settings) for key in (*ENGINES, "optimizer"))
    (seen,) = run_ranks(train_on, 1, settings)
    for block, keys, (kinds, loss) in zip(blocks("json"), settings, seen, strict=True):
        engine = next((kind for key, kind in ENGINES.items() if key in keys), "PipelineEngine")
        types = [keys.get(key, {"type": o})["type"] for key, o in (("optimizer", "SGD"), ("scheduler", "NoneType"))]
        assert kinds == [engine, *types] and 0 < loss < 10, block.where


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key twice in {keys}"
    return dict(pairs)


def test_json_in_the_text() -> None:
    """Values, and ``"key": value`` of any block."""
    pairs = 0
    for span in spans("json"):
        with at(span):
            if is_json(span.text):
                value = json.loads(span.text)
                if isinstance(value, dict):
                    config.parse({"token_pipeline": {"cut": value}})
                if isinstance(value, str):
                    assert f'"{value}"' in sources() or value.lower() in deepspeeds_words(), f"no key has {value!r}"
                continue
            pair = json.loads("{" + span.text + "}", object_pairs_hook=no_duplicates)
            pairs += 1
            if set(pair) <= set(elastic.ElasticPipelineConfig.model_fields) - {"enabled"}:
                elastic.parse({"elastic_pipeline": pair})
            elif set(pair) <= set(lamb_keys()):
                FusedLamb([torch.nn.Parameter(torch.zeros(1))], **pair)
            else:
                config.parse({"token_pipeline": pair})
    assert pairs >= 3
