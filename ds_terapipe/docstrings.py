"""Entries of a docstring's section, as texts for the reference and the JSON schema. Standard library only."""

from __future__ import annotations

import inspect
import re


def entries(documented: object, section: str) -> dict[str, str]:
    """Return the entries ``name: text`` of a section such as ``Attributes`` or ``Args``, each text on one line.

    An entry of several names, ``end_lr, power: text``, is there under each of them. Without docstrings (``python -OO``) there
    are none.
    """
    text = inspect.getdoc(documented) or ""
    found = re.search(rf"^{section}:\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE)
    parts = re.split(r"^ {4}(?=\S)", found[1], flags=re.MULTILINE)[1:] if found else []
    pairs = [(names, " ".join(words.split())) for names, _, words in (part.partition(": ") for part in parts)]
    return {name.strip(): words for names, words in pairs for name in names.split(",")}


def summary(documented: object) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
