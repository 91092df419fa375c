"""File operations of a save: counted, and ended before one of them or halfway through it."""

import io
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch


def _half_a_text(path: Path, text: str, *args: Any, **kwargs: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text[: len(text) // 2])


def _half_a_removal(folder: Any, *args: Any, **kwargs: Any) -> None:
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            path.unlink()
            return


def _half_a_copy(source: Any, to: Any, *args: Any, **kwargs: Any) -> None:
    content = Path(source).read_bytes()
    Path(to).write_bytes(content[: len(content) // 2])


def _half_a_tensor_file(whole: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    buffer = io.BytesIO()
    _SAVE(whole, buffer, *args, **kwargs)
    Path(file).write_bytes(buffer.getvalue()[: buffer.tell() // 2])


_SAVE = torch.save
# by name: whose function it is, and what half of it leaves; renames and folders are made at once
_OPERATIONS: dict[str, tuple[Any, Callable[..., None] | None]] = {
    "mkdir": (Path, None), "rename": (Path, None), "replace": (Path, None), "write_text": (Path, _half_a_text),
    "rmtree": (shutil, _half_a_removal), "copy2": (shutil, _half_a_copy), "copytree": (shutil, None),
    "save": (torch, _half_a_tensor_file),
}  # fmt: skip


@contextmanager
def operations(end: Callable[[], Any], at: int | None = None, halfway: bool = False) -> Iterator[list[str]]:
    """The operations that this thread has begun, by name, as they come. Launches beside it write files, too.

    ``end`` ends the process, or raises, before number ``at``, or ``halfway`` through it where it has a middle.
    """
    begun: list[str] = []
    thread = threading.get_ident()

    def counted(name: str, original: Callable[..., Any], half: Callable[..., None] | None) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            begun.append(name)
            if len(begun) - 1 == at:
                if halfway and half is not None:
                    half(*args, **kwargs)
                end()
            return original(*args, **kwargs)

        return operation

    with ExitStack() as stack:
        for name, (owner, half) in _OPERATIONS.items():
            stack.enter_context(patch.object(owner, name, counted(name, getattr(owner, name), half)))
        yield begun
