"""JSON files that a user hands in: read, checked field by field, and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ds_terapipe.errors import ConfigError, bad_value, is_finite, nearest, shown


class Fields:
    """Fields of one JSON object; every getter checks its value.

    Args:
        data: the object.
        where: how errors name it, the file's name first: ``plan.json`` or ``costs.json: stages[0]``.

    The getters raise ConfigError, one line with file, field and expectation.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data, self._where = data, where

    def path(self, name: str) -> str:
        """Return the name of a field of this object in errors."""
        return f"{self._where}.{name}" if ": " in self._where else f"{self._where}: {name}"

    def fail(self, name: str, rule: str, use: str) -> ConfigError:
        """The error for a field that breaks a rule."""
        if name not in self._data:
            return ConfigError(f"{self.path(name)}: missing, must be {rule}, use {use}")
        return bad_value(self.path(name), self._data[name], rule, use)

    def value(self, name: str) -> Any:
        """Return a field unchecked, None if it is missing."""
        return self._data.get(name)

    def _checked(self, name: str, fits: Callable[[Any], object], rule: str, use: str, default: object = None) -> Any:
        """Return a field that fits, or the default in place of a missing one."""
        value = self._data.get(name, default)
        if not fits(value):
            raise self.fail(name, rule, use)
        return value

    def number(self, name: str, use: str = "e.g. 0.5", default: float | None = None) -> float:
        """A number, finite and not negative."""
        return float(self._checked(name, is_number, "a number that is not negative", use, default))

    def positive(self, name: str) -> float:
        """A number above 0."""
        found: float = self._checked(name, lambda value: is_number(value) and value, "a positive number", "e.g. 8")
        return found

    @property
    def names(self) -> list[str]:
        """Names of all fields."""
        return list(self._data)

    def count(self, name: str, use: str = "e.g. 1") -> int:
        """A whole number of at least 1."""
        return int(self._checked(name, is_count, "a positive integer", use))

    def flag(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        return bool(self._checked(name, lambda value: isinstance(value, bool), "true or false", "false", default))

    def text(self, name: str, default: str) -> str:
        """A text."""
        return str(self._checked(name, lambda value: isinstance(value, str), "text", "any name", default))

    def only(self, known: Collection[str]) -> None:
        """Refuse a field of any other name."""
        for name in self._data:
            if name not in known:
                use = nearest(name, known) or f"one of {', '.join(sorted(known))}"
                raise self.fail(name, "a known field", use)

    def one_of(self, name: str, names: tuple[str, ...]) -> str:
        """One of the names."""
        return str(self._checked(name, lambda value: value in names, " or ".join(map(shown, names)), shown(names[0])))

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of positive whole numbers, at least one."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(map(is_count, value))

        return tuple(map(int, self._checked(name, fits, "a list of positive integers", "e.g. [256, 256]")))

    def rows(self, name: str, columns: tuple[str, ...], least: int = 1) -> list[tuple[float, ...]]:
        """A list of rows of numbers, none of them negative."""
        rule = f"a list of at least {least} rows [{', '.join(columns)}] of numbers that are not negative"
        use = f"a row [{', '.join(columns)}] per measurement"
        value = self._checked(name, lambda value: isinstance(value, list) and len(value) >= least, rule, use)
        for index, row in enumerate(value):
            if not isinstance(row, list) or len(row) != len(columns) or not all(map(is_number, row)):
                raise bad_value(
                    f"{self.path(name)}[{index}]", row, f"[{', '.join(columns)}], numbers that are not negative",
                    "a new measurement",
                )  # fmt: skip
        return [tuple(float(each) for each in row) for row in value]

    def blocks(self, name: str, least: int = 1) -> list[Fields]:
        """A list of objects."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) >= least and all(isinstance(each, dict) for each in value)

        use = "a file that was written by ds_terapipe"
        value = self._checked(name, fits, f"a list of at least {least} objects", use)
        return [Fields(each, f"{self.path(name)}[{index}]") for index, each in enumerate(value)]

    def block(self, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return an object unchecked."""
        found: dict[str, Any] = self._checked(name, lambda value: isinstance(value, dict), "an object", "{}", default)
        return found


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number that is not negative."""
    return is_finite(value) and value >= 0  # type: ignore[operator]


def is_count(value: object) -> bool:
    """Whether a JSON value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def read_json(path: str | Path, what: str, form: str | None = None) -> Fields:
    """The object in a JSON file.

    Args:
        path: the file.
        what: name of the expected content in errors: ``a plan``.
        form: required value of its field ``format``, if there is one.

    Raises:
        ConfigError: no such file, no JSON (a truncated file among them), no object, or another format.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}), must be {what}, use the path of one") from error
    except ValueError as error:
        raise ConfigError(
            f"{path}: is no JSON ({' '.join(str(error).split())}), must be {what} and whole, write it again"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got {shown(data, 40)}, must be {what}, a JSON object, write it again")
    if form is not None and data.get("format") != form:
        raise ConfigError(
            f"{path}: format: got {shown(data.get('format'))}, must be {shown(form)}, use {what} written by this version"
        )
    return Fields(data, str(path))


def check_writable(key: str, path: str | Path, use: str, what: str = "a file that can be written") -> None:
    """Raise ConfigError, in the name of ``key``, for a file that cannot be written, before its content exists."""
    _check_folder(key, path, Path(path).absolute().parent, use, what)


def check_writable_folder(key: str, path: str | Path, use: str) -> None:
    """Raise ConfigError, in the name of ``key``, for a folder that cannot be written to; it is made where it is missing."""
    _check_folder(key, path, Path(path), use, "a folder that can be written to")


def _check_folder(key: str, path: str | Path, folder: Path, use: str, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # without a name, so a process that is killed leaves nothing
            pass
    except OSError as error:
        # a file where a folder would have to be is an error of making the folder
        why = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
        raise bad_value(key, str(path), f"{what} ({why})", use) from error


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_whole(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}), must be in a directory that you may write to"
        ) from error


def write_whole(path: str | Path, text: str) -> None:
    """Write a file, whole or not at all. Raises OSError where it cannot be written."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # what went wrong is said already
            temporary.unlink(missing_ok=True)
