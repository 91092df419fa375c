"""Fenced blocks, inline code and links of README.md and docs/*.md: where each stands, and of what kind it is."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from ds_terapipe.schedule import Op

from .programs import ASSIGNMENT, ELSEWHERE, MEGATRON_DEEPSPEED, PACKAGE, ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
PROGRAMS = ("make ", "pip ", "python ", "python3 ", "deepspeed ", "ds_terapipe ", "bash ", "torchrun ")
# Imports that the text shows because they fail beside DeepSpeed 0.19.8: they have to.
BROKEN_IMPORTS = (
    "from megatron.model.vision.knn_monitor import compute_feature_bank",
    "from deepspeed.compression.compress import init_compression, redundancy_clean",
)
# Output is shown, not run: its first words tell which it is.
OUTPUTS = ("rank 0 (stage 0)", "load_checkpoint: got", "[Rank 0] ", "16 of 24 layers", "losses over", "MixedBatch")
# Words of Megatron-DeepSpeed, which is not here, and a commit of it. Its options are in its own arguments.py.
THEIRS = ("4efb479d", "CoreAttention", "CoreAttention.forward", "evaluate", "key_layer", "query_layer", "value_layer",
          "reshape", "view", "megatron/training.py", "megatron/model/transformer.py")  # fmt: skip
# Placeholders in the text, which no name in the code matches.
PLACES = (".bin/.idx", "[first, last]", "[row, column]", ".data", "ds_config.json")


class Piece(NamedTuple):
    """A block, a span of code or the target of a link."""

    document: str  # path below the repository's root
    line: int  # counted from 1
    text: str  # as it stands there; the line breaks in a span are single spaces
    language: str = ""  # of a fenced block

    @property
    def where(self) -> str:
        return f"{self.document}:{self.line}: {self.text.splitlines()[0]}"


def documents() -> list[str]:
    """README.md and all Markdown files of docs/, as paths below the root."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


@functools.cache
def shown() -> tuple[dict[str, list[Piece]], dict[str, list[Piece]], list[Piece]]:
    """The blocks and the spans of all documents by their kinds, and the links."""
    blocks, spans, links = dict[str, list[Piece]](), dict[str, list[Piece]](), list[Piece]()
    for name in documents():
        text = (ROOT / name).read_text(encoding="utf-8")
        at = partial(_piece, name, text)
        for match in FENCE.finditer(text):
            block = at(match.start(), match[2], match[1])
            blocks.setdefault(block_kind(block), []).append(block)
        # Blanked, not cut out: places stay what they are.
        prose = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
        for paragraph in re.split(r"\n\s*\n", prose):  # a quote without a partner would hide code
            assert "```" not in paragraph and paragraph.count("`") % 2 == 0, (
                f"{name}: an odd back-quote: {paragraph.strip()[:80]}"
            )
        for match in CODE.finditer(prose):
            span = at(match.start(), " ".join(match[1].split()))
            spans.setdefault(span_kind(span), []).append(span)
        links += [at(match.start(), match[1]) for match in LINK.finditer(prose)]
    return blocks, spans, links


def _piece(name: str, text: str, at: int, shown: str, language: str = "") -> Piece:
    return Piece(name, text.count("\n", 0, at) + 1, shown, language)


def blocks(kind: str) -> list[Piece]:
    return shown()[0][kind]


def spans(kind: str) -> list[Piece]:
    return shown()[1][kind]


@functools.cache
def sources() -> str:
    """The text of all programs that the documents can be about."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests" / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    files += [ROOT / "train.py", ROOT / "setup.py"]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def block_kind(block: Piece) -> str:
    """``json``, ``python``, ``shell``, ``output`` or, of words of the sources, ``picture``."""
    commands = block.text.startswith(PROGRAMS) or ASSIGNMENT.match(block.text)
    rules = {
        "picture": block.language == "text", "json": block.language == "json", "python": block.language == "python",
        "shell": block.language in ("", "bash", "sh") and commands,
        "output": block.language == "" and block.text.startswith(OUTPUTS),
    }  # fmt: skip
    return _first(rules, block)


def span_kind(span: Piece) -> str:
    """The first kind whose rule the span meets; what the kind claims is for the tests to find out."""
    text = span.text
    rules = {
        "place": text in PLACES,
        "theirs": text in ELSEWHERE or (span.document == MEGATRON_DEEPSPEED and text in THEIRS),
        "import": re.match(r"(from [\w.]+ )?import \w", text),
        "command": text.startswith((*PROGRAMS, "train.py ")) or ASSIGNMENT.match(text),
        "option": text.startswith("--"),
        "json": is_json(text) or is_json("{" + text + "}"),
        "action": re.fullmatch(r"\d+[A-Z_]+[\d.]+(/\d+of\d+)?", text) or text in [op.value for op in Op],
        "file": re.fullmatch(r"[\w./*-]+\.(py|cpp|cu|sh|md|jsonl?|txt|svg)|[\w/]+/", text),
        "name": re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", text) or text == "1f1b",
    }
    return _first(rules, span)


def _first(rules: dict[str, Any], piece: Piece) -> str:
    found = next((kind for kind, meets in rules.items() if meets), None)
    assert found is not None, f"{piece.where}: of an unknown kind ({piece.language or 'no language'})"
    return found


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def at(piece: Piece) -> Iterator[None]:
    """Put the place in front of what went wrong there."""
    try:
        yield
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        pytest.fail(f"{piece.where}\n    {type(error).__name__}: {error}")
