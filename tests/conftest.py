"""Settings of all tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.mutants.table import mutant_table
from tests.pool import POOL, Launch

# Two cores may be shared with anything: how long an example takes to run or to make says nothing.
settings.register_profile("ds_terapipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ds_terapipe")

# What DeepSpeed compiles, PyTorch compiles under a lock file that stays behind where a process is killed, as tests kill some,
# and that everybody then waits for without end. The user's own cache is none of the tests' business.
_EXTENSIONS = Path(__file__).resolve().parents[1] / ".pytest_cache" / "torch_extensions"
_COMPILES_S = 300  # at most: a lock that is older is nobody's


def pytest_configure() -> None:
    """The environment of everything that tests start: our hook is on, compiled extensions have a place of their own."""
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "DS_TERAPIPE_AUTOLOAD"):
        os.environ.pop(name, None)
    if os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_EXTENSIONS)) != str(_EXTENSIONS):
        return
    for lock in _EXTENSIONS.glob("*/*/lock"):
        if time.time() - lock.stat().st_mtime > _COMPILES_S:
            lock.unlink(missing_ok=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the launches that the selected tests will ask for."""
    if session.config.option.collectonly:
        return
    found: dict[int, Launch] = {}
    for item in session.items:
        for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
            launch = getattr(definitions[-1].func, "launch", None)
            if launch is not None:
                found[id(launch)] = launch
    POOL.submit(list(found.values()))


def pytest_sessionfinish() -> None:
    """Begin none that no test waits for any more."""
    POOL.stop()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what each check made of each mutant, see test_mutants.py."""
    found = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "mutant"
    ]
    if not found:
        return
    terminalreporter.section("mutants: how far off in tolerances")
    for line in mutant_table(found):
        terminalreporter.write_line(line)
