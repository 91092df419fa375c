"""Settings of the tests of FusedLamb."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["auto", "plain"])
def backend(request: pytest.FixtureRequest) -> str:
    """The compiled op, and PyTorch."""
    return request.param
