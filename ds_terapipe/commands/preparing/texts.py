"""The documents of text files and of files with JSON in each line, read in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from ds_terapipe.commands.preparing.tokens import Encoding, short
from ds_terapipe.errors import ConfigError

PIECE = 4 << 20  # bytes of lines that a worker reads at once


class Piece(NamedTuple):
    """Piece that is read at once: a text file, or the lines that begin in a range of a file with JSON in each line."""

    path: Path
    start: int
    stop: int
    json_lines: bool


class Encoded(NamedTuple):
    """The tokens of a piece.

    Attributes:
        tokens: of all its documents, one array.
        lengths: of the sequences of each document.
        size: bytes of the piece.
    """

    tokens: Any
    lengths: list[list[int]]
    size: int


@dataclass(frozen=True)
class Reader:
    """Reads and encodes pieces.

    Attributes:
        encoding: from texts to tokens.
        keys: of a line's object, each of which is a document.
    """

    encoding: Encoding
    keys: Sequence[str] = ("text",)

    def __call__(self, piece: Piece) -> Encoded:
        """The tokens of a piece.

        Raises:
            ConfigError: a file that cannot be read, or a line that is not as it must be.
        """
        try:
            texts = list(self._lines(piece)) if piece.json_lines else self._whole(piece.path)
        except OSError as error:
            raise unreadable(piece.path, error) from error
        documents = self.encoding.documents(texts)
        rows = [row for document in documents for row in document]
        tokens = numpy.concatenate(rows) if rows else numpy.empty(0, self.encoding.dtype)
        return Encoded(tokens, [[len(row) for row in document] for document in documents], piece.stop - piece.start)

    def _whole(self, path: Path) -> list[bytes]:
        """A text file as it is; none where it is empty or binary."""
        text = path.read_bytes()
        if not text or b"\0" in text:
            return []
        if self.encoding.tokenizer is not None:
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"--input: got {_place(path, error.start)}, no UTF-8, must be for --tokenizer, use e.g. iconv"
                ) from error
        return [text]

    def _lines(self, piece: Piece) -> Iterator[bytes]:
        with open(piece.path, "rb") as file:
            if piece.start:  # a line belongs to the piece in which it begins
                file.seek(piece.start - 1)
                file.readline()
            while (begin := file.tell()) < piece.stop and (line := file.readline()):
                if line.strip():
                    yield from self._texts(line, partial(_place, piece.path, begin))

    def _texts(self, line: bytes, place: Callable[[], str]) -> Iterator[bytes]:
        """The text of each key of a line; lines are counted only for an error."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _no_object(f"{place()} ({short(error)})") from error
        if not isinstance(found, dict):
            raise _no_object(f"{place()}, another value")
        for key in self.keys:
            if not isinstance(found.get(key), str):
                has = "no text" if key in found else "no key"
                others = [name for name, value in found.items() if isinstance(value, str)]
                raise ConfigError(
                    f"--json-keys: got {key}, {has} of {place()}, must be a text of each line, "
                    f"use e.g. {' '.join(others) or 'another file'}"
                )
            try:
                yield found[key].encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"--input: got {place()}, half a surrogate pair in {key}, must be Unicode, use e.g. U+FFFD"
                ) from error


def _no_object(got: str) -> ConfigError:
    return ConfigError(f'--input: got {got}, must be an object of JSON, use e.g. {{"text": "..."}}')


def _place(path: Path, begin: int) -> str:
    """File and number of the line in which a byte is."""
    with open(path, "rb") as file:
        number, left = 1, begin
        while left > 0 and (block := file.read(min(left, PIECE))):
            number += block.count(b"\n")
            left -= len(block)
    return f"{path}:{number}"


def pieces_of(files: Sequence[Path]) -> list[Piece]:
    """Return the pieces of these files, in their order.

    Raises:
        ConfigError: a file that cannot be read.
    """
    pieces = []
    for path in files:
        try:
            size, json_lines = path.stat().st_size, is_json_lines(path)
        except OSError as error:
            raise unreadable(path, error) from error
        starts = range(0, max(size, 1), PIECE) if json_lines else [0]
        pieces += [Piece(path, start, min(size, start + PIECE) if json_lines else size, json_lines) for start in starts]
    return pieces


def is_json_lines(path: Path) -> bool:
    """Whether a file is JSON lines, by its name, or by its first two lines; a file of one object is plain text."""
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return True
    if suffix != ".json":
        return False
    with open(path, "rb") as file:
        return _is_object(file.readline()) and _is_object(file.readline())


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The error for a file that cannot be read."""
    return ConfigError(f"--input: cannot read {path} ({error.strerror or error})")
