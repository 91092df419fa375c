"""The error that a user's configuration can cause, and its one-line form. Standard library only."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import numbers
import re
from collections.abc import Iterable, Iterator

LARGEST_COUNT = 2**53
"""Up to here every whole number of a JSON file is exact in a double, and fits the integers that it is put into."""


class ConfigError(ValueError):
    """A setting or a model that token pipelining cannot run; the message is one line.

    The form is ``key: got value, must be rule, use what``, with the key's full path in ``ds_config.json``. Every rank
    validates the same configuration, so every rank raises it.
    """


def shown(value: object, limit: int = 80) -> str:
    """``value`` as it would stand in a JSON file, on one line and at most ``limit`` characters long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold; true and false are none, nor are 400 digits of a JSON file."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def bad_value(key: str, got: object, rule: str, use: str) -> ConfigError:
    """The error for a value that breaks a rule.

    Args:
        key: full path of the key, ``token_pipeline.slices``.
        got: the given value.
        rule: rule of the value, to follow "must be".
        use: replacement, to follow "use".

    Returns:
        ``ConfigError: token_pipeline.slices: got -3, must be a positive number, a list of lengths or "auto", use e.g. 8``
    """
    return ConfigError(f"{key}: got {shown(got)}, must be {rule}, use {use}")


def unknown_key(block: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a key that a block does not have."""
    near = nearest(str(name), known)
    use = shown(near) if near else "one of them"
    return ConfigError(f"{block}: unknown key {shown(name)}, must be one of {', '.join(known)}, use {use}")


def one_line(error: BaseException) -> str:
    """Return the class and the text of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error of gloo or NCCL, without its source location."""
    line = next(iter(str(error).splitlines()), "")
    line = re.sub(r"^\[\S+:\d+\] ", "", line)  # gloo's messages begin with a source location
    return line.split(". This is typically caused by")[0][:300]


@contextlib.contextmanager
def named(key: str) -> Iterator[None]:
    """Context manager that prefixes errors of a file with the key that names it; the cause stays."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error.__cause__


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like ``word``, letter case and ``-`` for ``_`` aside; None if none is near."""
    plain = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
