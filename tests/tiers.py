"""Which tier a test is in: a rule, not a mark.

``make test-fast`` runs the tests that start no process, ``make test`` all but those marked `full`, ``make test-full`` all.
"""

import subprocess
from collections.abc import Iterator
from functools import cache
from multiprocessing import forkserver
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests import shown, spawn
from tests.pool import Launch

_STARTERS = (forkserver, subprocess, spawn, shown)


def starts_processes(item: pytest.Item) -> bool:
    """Whether a test, one of its fixtures or a helper of theirs in tests/ starts a process."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    functions = [item.function, *(definition.func for each in fixtures for definition in each)]  # type: ignore[attr-defined]
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if any(isinstance(value, Launch) for value in parameters):
        return True
    return any(hasattr(function, "launch") or _starts(function) for function in functions)


@cache
def _starts(function: Any) -> bool:
    return any(_is_starter(value) for value in _reached(function, set()))


def _reached(function: Any, seen: set[int]) -> Iterator[Any]:
    """All that a function of tests/ names, and the functions of tests/ among it."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        value = getattr(value, "__wrapped__", value)
        yield value
        if isinstance(value, FunctionType) and value.__module__.startswith("tests."):
            yield from _reached(value, seen)


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names(each))}


def _is_starter(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value in _STARTERS
    return getattr(value, "__module__", None) in {module.__name__ for module in _STARTERS} and value is not spawn.free_port
