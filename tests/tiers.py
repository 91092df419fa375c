"""Which tier a test is in: a rule, not a mark.

``make test-fast`` runs the tests that start no process, ``make test`` all but those marked `full`, ``make test-full`` all.
"""

import subprocess
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
    """Whether it names a starter, or a function of tests/ does that it names."""
    todo, seen = [function], set[int]()
    while todo:
        value = todo.pop()
        value = getattr(value, "__wrapped__", value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value is not function and _is_starter(value):
            return True
        if isinstance(value, FunctionType) and str(value.__module__).startswith("tests."):
            todo += [value.__globals__.get(name) for name in _names(value.__code__)]
    return False


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names(each))}


def _is_starter(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value in _STARTERS
    return getattr(value, "__module__", None) in {module.__name__ for module in _STARTERS} and value is not spawn.free_port
