"""Hooks of MkDocs: links to files of the repository outside docs/ work on the site, and docstrings lose Sphinx's roles."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((\.\.?/[^()\s#]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Link to a copy below ``source/``; a name that is no file stays, and is a dead link."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def copied(match: re.Match[str]) -> str:
        name = os.path.normpath(folder / match[1])
        if name.startswith(("docs/", "..")) or not (ROOT / name).is_file():
            return match[0]
        uri = f"source/{name}.txt"
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
        return f"]({os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)}"

    return LINK.sub(copied, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Take a role's name, as in :class:`Observer`, away from the name that it marks."""
    return re.sub(r":(?:class|meth|func|attr|data|mod):(?=<code>)", "", html)
