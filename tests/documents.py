"""Fenced blocks, inline code and links of README.md and docs/*.md, each with the place it stands in."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
ASSIGNMENT = re.compile(r"[A-Z][A-Z_0-9]*=\S*")


class Piece(NamedTuple):
    """A block, a span of code or the target of a link."""

    document: str  # path below the repository's root
    line: int  # counted from 1
    text: str  # as it stands there; the line breaks in a span are single spaces
    language: str = ""  # of a fenced block

    @property
    def where(self) -> str:
        """To name it in a test's message."""
        return f"{self.document}:{self.line}: {self.text.splitlines()[0]}"


class Document(NamedTuple):
    """A Markdown file taken apart."""

    blocks: list[Piece]
    spans: list[Piece]
    links: list[Piece]


def documents() -> list[str]:
    """README.md and all Markdown files of docs/, as paths below the root."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def take_apart(text: str, name: str) -> Document:
    """The pieces of a Markdown text. Raises ValueError for fences or back-quotes without a partner, which would hide code."""

    def piece(at: int, shown: str, language: str = "") -> Piece:
        return Piece(name, text.count("\n", 0, at) + 1, shown, language)

    blocks = [piece(match.start(), match[2], match[1]) for match in FENCE.finditer(text)]
    # Blanked, not cut out: places stay what they are.
    prose = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for number, paragraph in enumerate(re.split(r"\n\s*\n", prose)):
        if "```" in paragraph or paragraph.count("`") % 2:
            raise ValueError(f"{name}: paragraph {number} has an odd back-quote: {paragraph.strip()[:80]!r}")
    spans = [piece(match.start(), " ".join(match[1].split())) for match in CODE.finditer(prose)]
    return Document(blocks, spans, [piece(match.start(), match[1]) for match in LINK.finditer(prose)])


def commands(shell: str) -> list[list[str]]:
    """The words of each command of a piece of shell: one a line, or joined by ``&&``; comments are left out."""
    found = []
    for line in shell.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            found.append(words[:end])
            words = words[end + 1 :]
    return found
