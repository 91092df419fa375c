"""Plugin for pytest, `-p tests.device_stand_in.plugin`: operators are computed in all tests."""

from typing import Any

from tests.device_stand_in import compute


def pytest_sessionstart(session: Any) -> None:
    compute.install()
