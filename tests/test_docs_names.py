"""README.md and docs/*.md name things that are there: commands, their options, names of code, files, links, output."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_terapipe import cli
from ds_terapipe.schedule import Action, Op
from tests.benchmarks import elastic_finetune_picture as picture

from .documents import ASSIGNMENT, ROOT, commands
from .programs import Rejected, check, check_setting, options_of
from .shown import MEGATRON_DEEPSPEED, OUTPUTS, PACKAGE, SHORT, at, blocks, shown, span_kind, spans

# ------------------------------------------------------------------------------------------------------------- commands


def test_commands_are_accepted() -> None:
    """By the programs' own parsers, which take the whole line or say what is wrong with it."""
    kinds = set()
    for piece in [*blocks("shell"), *spans("command")]:
        with at(piece):
            assert commands(piece.text), "no command"
            kinds.update(map(check, commands(piece.text)))
    assert kinds >= {"make", "pip", "ds_terapipe", "python -m", "script", "elsewhere", "setting"}


def test_options_by_themselves_are_of_the_command_before() -> None:
    """Where one is shown alone, the command is the last one that was shown in the same document; Megatron's are not here."""
    before: dict[str, Any] = {}
    checked = 0
    for span in shown().spans:
        kind = span_kind(span)
        if kind == "command":
            before[span.document] = commands(span.text)[-1]
        elif kind == "option" and span.document == MEGATRON_DEEPSPEED:
            assert re.fullmatch(r"(--[a-z][a-z0-9_.*-]+( [\w.]+)?\s?)+", span.text), span.where
        elif kind == "option":
            found = re.findall(r"--[\w-]+", span.text)
            assert found and set(found) <= options_of(before[span.document]), span.where
            checked += 1
    assert checked > 0


WRONG = """
make tests
make demo STEP=3
pip install -e '.[megatorn]'
pip install --no-such-option torch
python -m tests.benchmarks.lamb --round 3
python -m tests.benchmarks.emulation --processes many
python -m tests.benchmarks.none
python docs/none.py
ds_terapipe plans
ds_terapipe prepare-data --output-prefixes data/python
deepspeed --num_gpu 4 train.py --deepspeed_config ds_config.json
deepspeed train.py --deepspeed_configs ds_config.json
train.py --stage-layer 5,3
DS_TERAPIPE_AUTOLOADS=0
poetry install
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_wrong_command_is_refused(line: str) -> None:
    (command,) = commands(line)
    with pytest.raises(Rejected):
        check(command)


def test_the_help_of_every_subcommand() -> None:
    """``--help`` of each one that the text names, and the text names all of them."""
    found = [command.words for piece in spans("command") for command in commands(piece.text)]
    named = {words[1] for words in found if words[:1] == ("ds_terapipe",) and not words[1].startswith("-")}
    (action,) = [action for action in cli.build_parser()._actions if isinstance(action.choices, dict)]
    assert named == set(action.choices)
    for name in sorted(named):
        assert check(commands(f"ds_terapipe {name} --help")[0]) == "ds_terapipe"


def test_the_picture_of_schedules_is_what_its_command_draws(tmp_path: Path) -> None:
    script = tmp_path / "draw_schedules.py"
    script.write_bytes((ROOT / "docs" / script.name).read_bytes())
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "schedules.svg").read_bytes() == (ROOT / "docs" / "schedules.svg").read_bytes()


@pytest.mark.parametrize(
    ("begins", "source", "picture", "main", "at"),
    [
        ("ds_terapipe shapes docs/", "history.jsonl", "shapes.svg", cli.main, 1),
        ("python -m tests.benchmarks.elastic_finetune_picture docs/", "elastic.md", "finetune.svg", picture.main, 3),
    ],
    ids=["shapes", "fine-tuning"],
)
def test_a_picture_is_what_its_command_draws(
    tmp_path: Path, begins: str, source: str, picture: str, main: Callable[[list[str]], int], at: int
) -> None:
    (command,) = [span.text for span in spans("command") if span.text.startswith(begins)]
    (words,) = [each.words for each in commands(command)]
    where = {f"docs/{source}": str(ROOT / "docs" / source), f"docs/{picture}": str(tmp_path / picture)}
    assert main([where.get(word, word) for word in words[at:]]) == 0
    assert (tmp_path / picture).read_bytes() == (ROOT / "docs" / picture).read_bytes()


def test_the_table_of_shapes_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = [span.text for span in spans("command") if "--frozen" in span.text and span.document == "docs/elastic.md"]
    (words,) = [each.words for command in found for each in commands(command)]
    assert cli.main(list(words[1:])) == 0
    (block,) = [block for block in blocks("output") if block.text.startswith("16 of 24 layers frozen:")]
    assert block.text.strip() in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------- names and files


@functools.cache
def words_of_the_package() -> frozenset[str]:
    """Identifiers and words of string constants (docstrings left out) in the sources of the package and its example."""
    words: set[str] = set()
    for path in [*PACKAGE.rglob("*.py"), ROOT / "train.py", ROOT / "setup.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(None)
        words.update(re.findall(r"\w+", ast.dump(tree)), path.relative_to(ROOT).with_suffix("").parts)
    return frozenset(words)


@functools.cache
def classes_of_the_package() -> dict[str, str]:
    """The module of each class at the top of a module of the package."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    found = {name: re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE) for name, path in modules.items()}
    return {kind: name for name, kinds in found.items() for kind in kinds}


def resolved(dotted: str) -> Any:
    """The object that a dotted name means, which begins with a package.

    Raises:
        AttributeError, ImportError: there is no such thing.
    """
    first, *rest = dotted.split(".")
    name = SHORT.get(first, first)
    thing = importlib.import_module(name)
    for part in rest:
        name = f"{name}.{part}"
        thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(name)
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
    ours = ("ds_terapipe.FusedLambs(params)", "ds_terapipe.FusedLamb(parameters)")
    for wrong in (*ours, "torch.optim.Optimiser", "SliceContext.now", "slises"):
        with pytest.raises((AssertionError, AttributeError, ImportError)):
            check_name(wrong)


def test_actions_are_text_of_the_schedule() -> None:
    for span in spans("action"):
        with at(span):
            if span.text not in [op.value for op in Op]:
                assert str(Action.from_text(span.text)) == span.text


def test_files() -> None:
    """Below the folder of the section's room or one in it, of the package, of its sources in C++, or of the repository."""
    for span in spans("file"):
        room = PACKAGE / span.room if span.room else None
        folders = [*([room, *room.glob("*/")] if room else []), PACKAGE, ROOT / "csrc" / "lamb", ROOT]
        assert any([*folder.glob(span.text.rstrip("/"))] for folder in folders), span.where


def test_links() -> None:
    near = [link for link in shown().links if not re.match(r"https?://", link.text)]
    assert near and len(near) < len(shown().links)
    for link in near:
        target, _, anchor = link.text.partition("#")
        path = (ROOT / link.document).parent / target if target else ROOT / link.document
        assert path.exists(), link.where
        headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, link.where


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
