"""What README.md and docs/*.md show is run as it stands there: imports, JSON, commands, Python, names, files and links.

Every fenced block and every span of code has to be of a known kind. A new block of a new kind fails here until somebody
says what it is.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import ds_terapipe
from ds_terapipe import autoload, config
from ds_terapipe.optim import modes
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.schedule import Action, Op

from .documents import ASSIGNMENT, ROOT, Piece, commands, documents, take_apart
from .programs import ELSEWHERE, Rejected, check, check_setting, options_of
from .spawn import run_ranks

PACKAGE = ROOT / "ds_terapipe"
PROGRAMS = ("make ", "pip ", "python ", "python3 ", "deepspeed ", "ds_terapipe ", "bash ", "torchrun ")
MEGATRON_DEEPSPEED = "docs/megatron_deepspeed.md"
# Imports that the text shows because they fail beside DeepSpeed 0.19.8: they have to.
BROKEN_IMPORTS = (
    "from megatron.model.vision.knn_monitor import compute_feature_bank",
    "from deepspeed.compression.compress import init_compression, redundancy_clean",
)
# Output is shown, not run: what the package says there is in its sources, and its first words tell which it is.
OUTPUTS = {
    "rank 0 (stage 0) waited": ("waited {", "gradients of", "last seen in step", "no sign of life for"),
    "[Rank 0] step 5: loss": ("tokens/s", "s per step", "waited", "slices"),
}
# Words of Megatron-DeepSpeed, which is not here, and a commit of it. Its options are in its own arguments.py.
THEIRS = ("4efb479d", "CoreAttention", "CoreAttention.forward", "evaluate", "key_layer", "query_layer", "value_layer",
          "reshape", "view", "megatron/training.py", "megatron/model/transformer.py")  # fmt: skip
# What stands for something in the text, and is not to be found by name.
PLACES = (".bin/.idx", "[first, last]", "[row, column]", ".data", "ds_config.json")
SHORT = {"nn": "torch.nn", "F": "torch.nn.functional"}


@functools.cache
def shown() -> SimpleNamespace:
    """All blocks, spans and links of all documents."""
    found = [take_apart((ROOT / name).read_text(encoding="utf-8"), name) for name in documents()]
    return SimpleNamespace(
        **{kind: [p for one in found for p in getattr(one, kind)] for kind in ("blocks", "spans", "links")}
    )


def block_kind(block: Piece) -> str:
    """``json``, ``python``, ``shell`` or ``output``."""
    if block.language in ("json", "python"):
        return block.language
    if block.language in ("", "bash", "sh") and block.text.startswith(PROGRAMS):
        return "shell"
    if block.language == "" and block.text.startswith(tuple(OUTPUTS)):
        return "output"
    pytest.fail(f"{block.where}: a block of an unknown kind ({block.language or 'no language'})")


def span_kind(span: Piece) -> str:
    """The first kind whose rule the span meets; what the kind claims is for the tests to find out."""
    text = span.text
    rules: dict[str, Callable[[], Any]] = {
        "place": lambda: text in PLACES,
        "theirs": lambda: text in ELSEWHERE or (span.document == MEGATRON_DEEPSPEED and text in THEIRS),
        "import": lambda: re.match(r"(from [\w.]+ )?import \w", text),
        "command": lambda: text.startswith(PROGRAMS) or text.startswith("train.py ") or ASSIGNMENT.match(text),
        "option": lambda: text.startswith("--"),
        "json": lambda: is_json(text) or is_json("{" + text + "}"),
        "action": lambda: re.fullmatch(r"\d+[A-Z_]+[\d.]+", text) or text in [op.value for op in Op],
        "file": lambda: re.fullmatch(r"[\w./*-]+\.(py|cpp|cu|sh|md|json|txt|svg)|[\w/]+/", text),
        "name": lambda: re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", text) or text == "MALLOC_*" or text == "1f1b",
    }
    for kind, rule in rules.items():
        if rule():
            return kind
    pytest.fail(f"{span.where}: a piece of code of an unknown kind")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def blocks(kind: str) -> list[Piece]:
    """The blocks of a kind, of which there have to be some."""
    found = [block for block in shown().blocks if block_kind(block) == kind]
    assert found, f"no {kind} block in any document: has the parser gone blind?"
    return found


def spans(kind: str) -> list[Piece]:
    """The spans of a kind, of which there have to be some."""
    found = [span for span in shown().spans if span_kind(span) == kind]
    assert found, f"no span of the kind {kind} in any document: has the parser gone blind?"
    return found


@contextlib.contextmanager
def at(piece: Piece) -> Iterator[None]:
    """Put the place in front of what went wrong there."""
    try:
        yield
    except (AssertionError, Rejected, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        pytest.fail(f"{piece.where}\n    {type(error).__name__}: {error}")


def run_python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program in a new interpreter, outside the repository."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=folder, capture_output=True, text=True, timeout=240
    )


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
    for block in blocks("python"):
        done = run_python(block.text, tmp_path)
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
    assert any("token_pipeline" in each for each in settings) and any("optimizer" in each for each in settings)
    for block, keys, built in zip(found, settings, seen, strict=True):
        engine, optimizer, scheduler = built["kinds"]
        assert engine == ("TokenPipelineEngine" if "token_pipeline" in keys else "PipelineEngine"), block.where
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
        if name not in ("params", "backend", "tensor_parallel_group")
    }


def known_values() -> set[str]:
    """Words in quotation marks that are a value of some key or the name of a type."""
    values = {value for kind in (config.Schedule, config.Layout, config.WeightGradients) for value in get_args(kind)}
    return (
        values
        | {name for names in autoload.TYPES.values() for name in names}
        | set(modes.MODES)
        | {"bias_norm", "Lamb"}
    )


def test_json_in_the_text() -> None:
    """Values, and ``"key": value`` of either block."""
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
            if set(pair) <= set(lamb_settings()):
                FusedLamb([torch.nn.Parameter(torch.zeros(1))], **pair)
            else:
                config.parse({"token_pipeline": pair})
    assert pairs >= 3


def table(first_key: str) -> list[tuple[list[str], str]]:
    """Rows of README's table that begins with this key: the keys of a row, and its cell of defaults."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
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
    rows = table("enabled")
    assert sorted(key for keys, _ in rows for key in keys) == sorted(config.TokenPipelineConfig.model_fields)
    for keys, cell in rows:
        for number, key in enumerate(keys):
            assert config.TokenPipelineConfig.model_fields[key].default == default_of(cell, number), key


def test_the_table_of_fused_lamb_has_keys_of_its_own_and_their_defaults() -> None:
    rows = table("lr")
    assert {"lr", "betas", "mode", "exclude", "max_grad_norm"} <= {key for keys, _ in rows for key in keys}
    for keys, cell in rows:
        for number, key in enumerate(keys):
            default = lamb_settings()[key].default
            assert (list(default) if isinstance(default, tuple) else default) == default_of(cell, number), key


# ------------------------------------------------------------------------------------------------------------- commands


def test_commands_are_accepted() -> None:
    """By the programs' own parsers, which take the whole line or say what is wrong with it."""
    kinds: Counter[str] = Counter()
    for piece in [*blocks("shell"), *spans("command")]:
        with at(piece):
            found = commands(piece.text)
            assert found, "no command"
            for command in found:
                kinds[check(command)] += 1
    assert set(kinds) >= {"make", "pip", "ds_terapipe", "python -m", "script", "elsewhere", "setting"}, kinds


def test_options_by_themselves_are_of_the_command_before() -> None:
    """Where one is shown alone, the command is the last one that was shown in the same document; Megatron's are not here."""
    before: dict[str, Any] = {}
    checked = 0
    for span in shown().spans:
        kind = span_kind(span)
        if kind == "command":
            *_, before[span.document] = commands(span.text)
        if kind != "option":
            continue
        if span.document == MEGATRON_DEEPSPEED:
            assert re.fullmatch(r"(--[a-z][a-z0-9_.*-]+( [\w.]+)?\s?)+", span.text), span.where
            continue
        for option in re.findall(r"--[\w-]+", span.text):
            assert option in options_of(before[span.document]), span.where
            checked += 1
    assert checked > 0


@pytest.mark.parametrize(
    "line",
    [
        "make tests",
        "make demo STEP=3",
        "pip install -e '.[megatorn]'",
        "pip install --no-such-option torch",
        "python -m tests.benchmarks.lamb --round 3",
        "python -m tests.benchmarks.emulation --processes many",
        "python -m tests.benchmarks.none",
        "python docs/none.py",
        "ds_terapipe plans",
        "ds_terapipe prepare-data --output-prefixes data/python",
        "deepspeed --num_gpu 4 train.py --deepspeed_config ds_config.json",
        "deepspeed train.py --deepspeed_configs ds_config.json",
        "train.py --stage-layer 5,3",
        "DS_TERAPIPE_AUTOLOADS=0",
        "poetry install",
    ],
)
def test_a_wrong_command_is_refused(line: str) -> None:
    (command,) = commands(line)
    with pytest.raises(Rejected):
        check(command)


def test_the_help_of_every_subcommand() -> None:
    """``--help`` of each one that the text names, and the text names all of them."""
    named = {command.words[1] for piece in spans("command") for command in commands(piece.text)
             if command.words[:1] == ("ds_terapipe",) and not command.words[1].startswith("-")}  # fmt: skip
    from ds_terapipe.cli import build_parser

    (action,) = [action for action in build_parser()._actions if isinstance(action.choices, dict)]
    assert named == set(action.choices)
    for name in sorted(named):
        assert check(commands(f"ds_terapipe {name} --help")[0]) == "ds_terapipe"


def test_the_picture_is_what_its_command_draws(tmp_path: Path) -> None:
    script = tmp_path / "draw_schedules.py"
    script.write_bytes((ROOT / "docs" / script.name).read_bytes())
    done = run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "schedules.svg").read_bytes() == (ROOT / "docs" / "schedules.svg").read_bytes()


# ------------------------------------------------------------------------------------------- names, files, links, output


@functools.cache
def words_of_the_package() -> frozenset[str]:
    """Identifiers and words of string constants (docstrings left out) in the sources of the package and its example."""
    words: set[str] = set()
    for path in [*PACKAGE.rglob("*.py"), ROOT / "train.py", ROOT / "setup.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            for field in ("id", "attr", "name", "arg"):
                name = getattr(node, field, None)
                words.update([name] if isinstance(name, str) else ())
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                words.update(re.findall(r"[A-Za-z0-9_]+", node.value))
        words.update(part for part in path.relative_to(ROOT).with_suffix("").parts)
    return frozenset(words)


@functools.cache
def classes_of_the_package() -> dict[str, str]:
    """The module of each class at the top of a module of the package."""
    return {
        node.name: ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def resolved(dotted: str) -> Any:
    """What a dotted name that begins with a package means.

    Raises:
        AttributeError, ImportError: there is no such thing.
    """
    first, *rest = dotted.split(".")
    name = SHORT.get(first, first)
    thing = importlib.import_module(name)
    for part in rest:
        name = f"{name}.{part}"
        if not hasattr(thing, part):
            thing = importlib.import_module(name)
        else:
            thing = getattr(thing, part)
    return thing


def check_name(text: str) -> None:
    """A dotted name is resolved and its arguments are looked up; a word is one that the package's sources use."""
    dotted, call, inside = text.partition("(")
    if dotted.split(".")[0] in ("ds_terapipe", "torch", "deepspeed", "megatron", *SHORT) and "." in dotted:
        thing = resolved(dotted)
        given = [part.strip().partition("=")[0] for part in inside.rstrip(")").split(",") if part.strip(" .")]
        if given:
            with contextlib.suppress(ValueError):  # C functions have no signature
                assert set(given) <= set(inspect.signature(thing).parameters), f"{dotted} does not take all of {given}"
        return
    owner, _, member = dotted.partition(".")
    if owner in classes_of_the_package():
        kind = getattr(importlib.import_module(classes_of_the_package()[owner]), owner)
        assert not member or hasattr(kind, member), f"{owner} has no {member}"
        return
    unknown = [part for part in re.findall(r"\w+", dotted) if part not in words_of_the_package() and part != "self"]
    assert not unknown, f"the package's sources have no {unknown}"
    assert not call or dotted in words_of_the_package()


def test_names() -> None:
    for span in spans("name"):
        with at(span):
            check_name(span.text)
    for wrong in (
        "ds_terapipe.FusedLambs(params)",
        "ds_terapipe.FusedLamb(parameters)",
        "torch.optim.Optimiser",
        "slises",
    ):
        with pytest.raises((AssertionError, AttributeError, ImportError)):
            check_name(wrong)


def test_actions_are_text_of_the_schedule() -> None:
    for span in spans("action"):
        with at(span):
            if span.text not in [op.value for op in Op]:
                assert str(Action.from_text(span.text)) == span.text


def test_files() -> None:
    """Below the folder of the section's room, of the package, of its sources in C++, or of the repository."""
    for span in spans("file"):
        folders = [PACKAGE / span.room] if span.room else []
        folders += [PACKAGE, ROOT / "csrc" / "lamb", ROOT]
        assert any([*folder.glob(span.text.rstrip("/"))] for folder in folders), span.where


def test_links() -> None:
    near = [link for link in shown().links if not re.match(r"https?://", link.text)]
    assert near and len(near) < len(shown().links)
    for link in near:
        target, _, anchor = link.text.partition("#")
        path = (ROOT / link.document).parent / target if target else ROOT / link.document
        assert path.exists(), link.where
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings], (
                link.where
            )


def test_variables_are_read_by_somebody() -> None:
    found = [span for span in spans("command") if ASSIGNMENT.match(span.text)]
    assert found
    for span in found:
        with at(span):
            check_setting(span.text)


def test_output_is_in_the_words_of_the_package() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    for block in blocks("output"):
        (phrases,) = [phrases for start, phrases in OUTPUTS.items() if block.text.startswith(start)]
        for phrase in phrases:
            assert phrase.rstrip(" {") in block.text and phrase in sources, f"{block.where}: {phrase}"
