"""README.md and docs/*.md name things that are there: commands, their options, names of code, files, links, output."""

from __future__ import annotations

import itertools
import pydoc
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_terapipe import cli
from ds_terapipe.schedule import Action, Op
from tests.benchmarks import elastic_finetune_picture as picture

from .documents import ROOT, commands
from .programs import Rejected, check
from .shown import MEGATRON_DEEPSPEED, MEGATRON_LM, PACKAGE, SHORT, at, block_kind, blocks, shown, sources, spans


def test_commands_are_accepted() -> None:
    """By the programs' own parsers, which take the whole line or say what is wrong with it."""
    kinds = set()
    for piece in [*blocks("shell"), *spans("command")]:
        with at(piece):
            assert commands(piece.text), "no command"
            kinds.update(map(check, commands(piece.text)))
    assert kinds >= {"make", "pip", "ds_terapipe", "python -m", "script", "elsewhere", "setting"}


def test_options_by_themselves_are_of_some_program() -> None:
    for span in spans("option"):
        found = [f'"{option}"' for option in re.findall(r"--[\w-]+", span.text)]
        theirs = span.document in (MEGATRON_DEEPSPEED, MEGATRON_LM)
        assert found and (theirs or all(each in sources() for each in found)), span.where


WRONG = """
make tests
make demo STEP=3
pip install -e '.[megatorn]'
python -m tests.benchmarks.lamb --round 3
python -m tests.benchmarks.none
python docs/none.py
ds_terapipe prepare-data --output-prefixes data/python
deepspeed --num_gpu 4 train.py --deepspeed_config ds_config.json
torchrun --nprocs-per-node 4 train.py
train.py --stage-layer 5,3
DS_TERAPIPE_AUTOLOADS=0
poetry install
"""


def test_a_wrong_command_is_refused() -> None:
    for command in commands(WRONG):
        with pytest.raises(Rejected):
            check(command)


def test_every_subcommand_is_shown() -> None:
    found = [command.words for piece in spans("command") for command in commands(piece.text)]
    named = {words[1] for words in found if words[:1] == ("ds_terapipe",) and not words[1].startswith("-")}
    (action,) = [action for action in cli.build_parser()._actions if isinstance(action.choices, dict)]
    assert named == set(action.choices)


def test_the_picture_of_schedules_is_what_its_command_draws(tmp_path: Path) -> None:
    script = tmp_path / "draw_schedules.py"
    script.write_bytes((ROOT / "docs" / script.name).read_bytes())
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "schedules.svg").read_bytes() == (ROOT / "docs" / "schedules.svg").read_bytes()


@pytest.mark.parametrize(
    ("begins", "source", "picture", "main", "at"),
    [
        ("ds_terapipe shapes docs/", "history.jsonl", "shapes.svg", cli.main, 1),
        ("python -m tests.benchmarks.elastic_finetune_picture docs/", "benchmarks.md", "finetune.svg", picture.main, 3),
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
    found = [span.text for span in spans("command") if "--frozen" in span.text and "freezing.md" in span.document]
    (words,) = [each.words for command in found for each in commands(command)]
    assert cli.main(list(words[1:])) == 0
    (block,) = [block for block in blocks("output") if block.text.startswith("16 of 24 layers frozen:")]
    assert block.text.strip() in capsys.readouterr().out


def test_names() -> None:
    """Of torch and other packages they are there; of ours they are words of the sources."""
    words = {"self", *re.findall(r"\w+", sources()), *(path.stem for path in PACKAGE.rglob("*"))}
    for span in spans("name"):
        dotted = span.text.partition("(")[0]
        first, *rest = dotted.split(".")
        if rest and first in ("ds_terapipe", "torch", "deepspeed", "megatron", *SHORT):
            assert pydoc.locate(".".join([SHORT.get(first, first), *rest])) is not None, span.where
        else:
            assert set(re.findall(r"\w+", dotted)) <= words, span.where
    files = {path.name for path in PACKAGE.rglob("*.py")}
    for block in (each for each in shown().blocks if block_kind(each) == "picture"):
        assert set(re.findall(r"[A-Z]\w+|\w+\.py", block.text)) <= words | files, block.where


def test_actions_are_text_of_the_schedule() -> None:
    for span in spans("action"):
        with at(span):
            assert span.text in [op.value for op in Op] or str(Action.from_text(span.text)) == span.text


def test_files() -> None:
    """Of the repository, the package or the sources in C++."""
    for span in spans("file"):
        name = span.text.rstrip("/")
        assert any(itertools.chain(ROOT.glob(name), PACKAGE.rglob(name), (ROOT / "csrc").rglob(name))), span.where


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
