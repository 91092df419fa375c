"""README.md and docs/*.md show code that runs as it stands there, and name things that are there.

Every fenced block and every span of code has to be of a known kind. A new block of a new kind fails here until its kind is added.
"""

import ast
import functools
import importlib
import itertools
import json
import pydoc
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_terapipe
from ds_terapipe import autoload, cli, config
from ds_terapipe.commands.schema import lamb_keys
from ds_terapipe.elastic import settings as elastic
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.schedule import Action, Op

from .programs import MEGATRON_DEEPSPEED, MEGATRON_LM, PACKAGE, ROOT, check, commands
from .shown import BROKEN_IMPORTS, at, blocks, documents, is_json, shown, sources, spans
from .spawn import run_ranks, run_script

ENGINES = {"elastic_pipeline": "ElasticPipelineEngine", "token_pipeline": "TokenPipelineEngine"}
_WITH_KEYS = ("runtime.constants", "runtime.config", "runtime.zero.config", "monitor.config")


def test_everything_is_of_a_known_kind() -> None:
    of_spans = {"place", "theirs", "import", "command", "option", "json", "action", "file", "name"}
    assert [set(kinds) for kinds in shown()[:2]] == [{"json", "python", "shell", "output", "picture"}, of_spans]


def test_imports_are_executed() -> None:
    """Statements as they stand, and one for each ``ds_terapipe.<name>`` that the text shows."""
    statements = {span.text: span.document for span in spans("import")}
    assert "from ds_terapipe import FusedLamb" in statements
    assert {statements[text] for text in BROKEN_IMPORTS} == {MEGATRON_DEEPSPEED}
    for name in (span.text.partition("(")[0] for span in spans("name") if span.text.startswith("ds_terapipe.")):
        statements["from {} import {}".format(*name.rsplit(".", 1))] = name
    failed = set()
    for statement in statements:
        try:
            exec(statement, {})
        except ImportError:
            failed.add(statement)
    assert failed == set(BROKEN_IMPORTS)


def test_python_blocks_run(tmp_path: Path) -> None:
    for block in blocks("python"):
        end = run_script("import torch\ntorch._import_device_backends()\n" + block.text, tmp_path)
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
    for block, keys, (built, loss) in zip(blocks("json"), settings, seen, strict=True):
        engine = next((kind for key, kind in ENGINES.items() if key in keys), "PipelineEngine")
        types = [keys.get(key, {"type": o})["type"] for key, o in (("optimizer", "SGD"), ("scheduler", "NoneType"))]
        assert built == [engine, *types] and 0 < loss < 10, block.where


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key twice in {keys}"
    return dict(pairs)


def test_json_in_the_text() -> None:
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


def test_commands_are_accepted() -> None:
    found = set()
    for piece in [*blocks("shell"), *spans("command")]:
        with at(piece):
            assert commands(piece.text), "no command"
            found.update(map(check, commands(piece.text)))
    assert found >= {"make", "pip", "ds_terapipe", "python -m", "script", "elsewhere", "setting"}


@pytest.mark.parametrize(("script", "of", "pattern"), [("draw_pictures", "pictures", "*.svg"), ("make_reference", "pages", "")])
def test_files_of_the_docs_are_what_their_script_writes(script: str, of: str, pattern: str) -> None:
    """And there is no picture that a script does not draw."""
    made = runpy.run_path(str(ROOT / "docs" / f"{script}.py"))
    folder, texts = made["FOLDER"], made[of]()
    assert texts == {name: (folder / name).read_text(encoding="utf-8") for name in texts}
    assert not pattern or {path.name for path in (ROOT / "docs").rglob(pattern)} == set(texts)


def test_every_page_is_in_the_navigation_and_every_public_name_in_its_page() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(f"docs/{name}" for name in named) == documents()[1:]
    names = re.findall(r"^::: (\S+)", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    for module, _, name in (name.rpartition(".") for name in names):
        assert hasattr(importlib.import_module(module), name), name
    assert {f"ds_terapipe.{module}.{name}" for name, module in ds_terapipe._PUBLIC.items()} <= set(names)


def test_the_table_of_shapes_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = [span.text for span in spans("command") if "--frozen" in span.text and "freezing.md" in span.document]
    ((_, *words),) = [each for command in found for each in commands(command)]
    assert cli.main(words) == 0
    (block,) = [block for block in blocks("output") if block.text.startswith("16 of 24 layers frozen:")]
    assert block.text.strip() in capsys.readouterr().out


def test_names() -> None:
    """Of torch and other packages they are there; of ours they are words of the sources."""
    short = {"nn": "torch.nn", "F": "torch.nn.functional"}
    words = {"self", *re.findall(r"\w+", sources()), *(path.stem for path in PACKAGE.rglob("*"))}
    for span in spans("name"):
        dotted = span.text.partition("(")[0]
        first, *rest = dotted.split(".")
        if rest and first in ("ds_terapipe", "torch", "deepspeed", "megatron", *short):
            assert pydoc.locate(".".join([short.get(first, first), *rest])) is not None, span.where
        else:
            assert set(re.findall(r"\w+", dotted)) <= words, span.where
    files = {path.name for path in PACKAGE.rglob("*.py")}
    for block in blocks("picture"):
        assert set(re.findall(r"\b[A-Z]\w+|\w+\.py", block.text)) <= words | files, block.where


def test_options_files_and_actions() -> None:
    """Options are of some program, files of the repository, the package or the sources in C++, actions the schedule's text."""
    for span in spans("option"):
        found = [f'"{option}"' for option in re.findall(r"--[\w-]+", span.text)]
        theirs = span.document in (MEGATRON_DEEPSPEED, MEGATRON_LM)
        assert found and (theirs or all(each in sources() for each in found)), span.where
    for span in spans("file"):
        name = span.text.rstrip("/")
        assert any(itertools.chain(ROOT.glob(name), PACKAGE.rglob(name), (ROOT / "csrc").rglob(name))), span.where
    for span in spans("action"):
        with at(span):
            assert span.text in [op.value for op in Op] or str(Action.from_text(span.text)) == span.text


def test_links() -> None:
    near = [link for link in shown()[2] if not re.match(r"https?://", link.text)]
    assert near and len(near) < len(shown()[2])
    for link in near:
        target, _, anchor = link.text.partition("#")
        path = (ROOT / link.document).parent / target if target else ROOT / link.document
        assert path.exists(), link.where
        text = path.read_text(encoding="utf-8") if anchor else ""
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        anchors += re.findall(r"^::: (\S+)$", text, re.MULTILINE)
        assert not anchor or anchor in anchors, link.where


BANNED = re.compile(r"\b(?i:nobody|whoever|lest|anew)\b|(?:^|(?<=[.:;|] ))What (?!is |does |do |are |to |can |about )[a-z]", re.M)


@pytest.mark.parametrize("name", documents())
def test_a_page_is_short_and_plain(name: str) -> None:
    """Paragraphs have five lines of 100 characters, sentences 25 words; the reference may be long."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not (found := BANNED.search(text)), f"{found}"
    assert name.startswith("docs/reference/") or len(text.encode()) <= 12_000
    if name.startswith(("docs/tutorials/", "docs/how-to/", "docs/explanation/")):
        parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        parts = [" ".join(part.split()) for part in parts if not part.lstrip().startswith("|")]
        assert not (long := [part for part in parts if len(part) > 500]), long[0]
        sentences = [each for part in parts for each in re.split(r"(?<=[.!?:])\*{0,2} ", re.sub(r"`[^`]*`", "code", part))]
        assert not (long := [each for each in sentences if len(each.split()) > 25]), long[0]


def test_docstrings_begin_with_their_noun_or_verb() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                assert not re.match(r"What |As `", text) and not BANNED.search(text), f"{path}: {text}"
