"""Cases that one launch runs together, of which some are for ``make test-full``: those have a launch of their own."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def marked(cases: Iterable[Any], full: Container[Any]) -> list[Any]:
    """As parameters of a test, those that are in ``full`` marked so; a tuple is several of them."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.full] if case in full else [])
        for case in cases
    ]


def is_full(request: pytest.FixtureRequest) -> bool:
    """Whether the test that asks for the fixture is one of those."""
    return any(mark.name == "full" for mark in request.node.iter_markers())
