"""README.md and docs/*.md name things that are there: commands, their options, names of code, files, links, output."""

import ast
import importlib
import itertools
import pydoc
import re
import runpy

import pytest

import ds_terapipe
from ds_terapipe import cli
from ds_terapipe.schedule import Action, Op

from .programs import ROOT, check, commands
from .shown import MEGATRON_DEEPSPEED, MEGATRON_LM, PACKAGE, at, block_kind, blocks, documents, shown, sources, spans


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


def test_every_subcommand_is_shown() -> None:
    found = [command for piece in spans("command") for command in commands(piece.text)]
    named = {words[1] for words in found if words[0] == "ds_terapipe" and not words[1].startswith("-")}
    (action,) = [action for action in cli.build_parser()._actions if isinstance(action.choices, dict)]
    assert named == set(action.choices)


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
    for block in (each for each in shown().blocks if block_kind(each) == "picture"):
        assert set(re.findall(r"\b[A-Z]\w+|\w+\.py", block.text)) <= words | files, block.where


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
        text = path.read_text(encoding="utf-8") if anchor else ""
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        anchors += re.findall(r"^::: (\S+)$", text, re.MULTILINE)
        assert not anchor or anchor in anchors, link.where


BANNED = re.compile(r"\b(?i:nobody|whoever|lest|anew)\b|(?:^|(?<=[.:;|] ))What (?!is |does |do |are |to |can |about )[a-z]", re.M)
LONGEST_PAGE, LONGEST_PARAGRAPH, MOST_WORDS = 12_000, 500, 25


@pytest.mark.parametrize("name", documents())
def test_a_page_is_short_and_plain(name: str) -> None:
    """Paragraphs of five lines of 100 characters, sentences of 25 words; the reference may be long."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not (found := BANNED.search(text)), f"{found}"
    assert name.startswith("docs/reference/") or len(text.encode()) <= LONGEST_PAGE
    if name.startswith(("docs/tutorials/", "docs/how-to/", "docs/explanation/")):
        parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        parts = [" ".join(part.split()) for part in parts if not part.lstrip().startswith("|")]
        assert not (long := [part for part in parts if len(part) > LONGEST_PARAGRAPH]), long[0]
        sentences = [each for part in parts for each in re.split(r"(?<=[.!?:])\*{0,2} ", re.sub(r"`[^`]*`", "code", part))]
        assert not (long := [each for each in sentences if len(each.split()) > MOST_WORDS]), long[0]


def test_docstrings_begin_with_their_noun_or_verb() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                assert not re.match(r"What |As `", text) and not BANNED.search(text), f"{path}: {text}"
