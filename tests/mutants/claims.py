"""Claims of yes or no: whether a test's own comparison holds, and nothing else than that comparison counts."""

from __future__ import annotations

import importlib
import inspect
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.harness import applied

_TESTS = Path(__file__).parents[1]
_COMPARES = ("_pytest", "pytest")  # packages that compare for a test: pytest.raises, pytest.approx


def holds(claim: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether the assertions of ``claim``, a test or part of one, hold.

    False where one of them does not, or where ``pytest.raises`` in it waited for an error in vain or got one that says
    something else. All other errors pass, assertions of the package's own among them: those are no comparison of the test.
    """
    try:
        claim(*args, **kwargs)
    except (AssertionError, pytest.fail.Exception) as failure:
        if not _is_of_a_test(failure):
            raise
        print(f"{getattr(claim, '__name__', claim)} does not hold: {failure}")
        return False
    return True


def _is_of_a_test(failure: BaseException) -> bool:
    """Whether the comparison that failed stands in a test, or was made for one by pytest."""
    for frame in reversed(traceback.extract_tb(failure.__traceback__)):
        path = Path(frame.filename)
        if _TESTS in path.parents:
            return True
        if not set(_COMPARES) & set(path.parts):
            return False
    return False


def refused_or_let_pass(ranks: Iterable[Mapping[str, Sequence[Any]]]) -> Any:
    """What ranks were told, (type of the error or "nothing", ...) by name, unless that is an error other than ConfigError.

    A mutant that ends in such an error is not caught by it.
    """
    for told in (ranks := list(ranks)):
        for name, (kind, *rest) in told.items():
            if kind not in ("ConfigError", "nothing"):
                raise RuntimeError(f"{name}: {kind}: {rest}")
    return ranks


def passes(mutant: str | None, test: str, *args: Any) -> bool:
    """Whether a test of one process, ``"package.module:function"``, holds under a mutant.

    ``args`` are those that come from ``pytest.mark.parametrize``, in the order of the parameters; ``tmp_path`` is made here.
    """
    module, _, name = test.partition(":")
    function = getattr(importlib.import_module(module), name)
    names = list(inspect.signature(function).parameters)
    with tempfile.TemporaryDirectory() as folder, applied(mutant):
        values = {"tmp_path": Path(folder)} if "tmp_path" in names else {}
        given = zip((name for name in names if name not in values), args, strict=True)
        return holds(function, **values, **dict(given))
