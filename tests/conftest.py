"""Settings of all tests."""

import gc
import os
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import spawn
from tests.pool import POOL, Launch
from tests.tiers import starts_processes

# Two cores may be shared with anything: how long an example takes to run or to make says nothing.
settings.register_profile("ds_terapipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ds_terapipe")

# PyTorch compiles DeepSpeed's ops under a lock file. Tests kill processes, whose locks stay and block all later compilations.
# So tests have a folder of their own, apart from the user's cache.
_EXTENSIONS = Path(__file__).resolve().parents[1] / ".pytest_cache" / "torch_extensions"
_COMPILES_S = 300  # at most: an older lock has no owner
_QUIET_S = 0.0045  # that the loop below takes on the machine of which --most-minutes is said
_BEGIN = time.monotonic()


def pytest_configure(config: pytest.Config) -> None:
    """The environment of everything that tests start: our hook is on, compiled extensions have a place of their own."""
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "DS_TERAPIPE_AUTOLOAD"):
        os.environ.pop(name, None)
    own = os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_EXTENSIONS)) == str(_EXTENSIONS)
    for name in spawn.SERVERS if config.option.most_minutes and not config.option.collectonly else ():
        spawn.server(name)  # a run of all tests: it imports while they are collected
    for lock in _EXTENSIONS.glob("*/*/lock") if own else ():
        if time.time() - lock.stat().st_mtime > _COMPILES_S:
            lock.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, and put those that wait for launches behind all others, which run meanwhile."""
    for item in items:
        if starts_processes(item):
            item.add_marker("processes")
    items.sort(key=lambda item: bool(_launches_of(item)))


def _launches_of(item: pytest.Item) -> list[Launch]:
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    launches = [getattr(definitions[-1].func, "launch", None) for definitions in fixtures]
    launches += item.callspec.params.values() if hasattr(item, "callspec") else []
    return [launch for launch in launches if isinstance(launch, Launch)]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    gc.collect()
    gc.freeze()  # what is imported stays: no collection has to go through it again
    found = {id(launch): launch for item in session.items for launch in _launches_of(item)}
    POOL.submit(list(found.values()))


def pytest_runtest_setup() -> None:
    """Seed PyTorch, so that a test's numbers do not depend on the tests before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest", type=int, default=0, help="print so many of the slowest tests and launches")
    parser.addoption("--most-minutes", type=float, help="fail above; more on a slower machine")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    reports = [report for each in terminalreporter.stats.values() for report in each if hasattr(report, "duration")]
    took = [(f"{report.nodeid} ({report.when})", report.duration) for report in reports]
    took += [(f"launch {launch.name} x {launch.world_size}", launch.seconds) for launch in POOL.launches]
    if config.option.slowest:
        terminalreporter.section("slowest")
        for name, seconds in sorted(took, key=lambda each: -each[1])[: config.option.slowest]:
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Begin no launch that no test waits for, and fail above the limit."""
    POOL.stop()
    most = session.config.option.most_minutes
    if most is None:
        return
    minutes = (time.monotonic() - _BEGIN) / 60
    seconds = min(timeit.repeat("for n in range(100_000): total += n * n", "total = 0", number=1, repeat=30))
    limit = most * min(max(seconds / _QUIET_S, 1.0), 20 / 12)  # more on a machine that is slower
    if minutes > limit:
        print(f"\n--most-minutes: took {minutes:.1f}, must be at most {limit:.1f}, see the slowest")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(params=["c++", "python"])
def operators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of slices as they are compiled, and as they run where there is no compiler."""
    from ds_terapipe.pipeline.operators import compiled

    if request.param == "python":
        monkeypatch.setattr(compiled, "load", lambda: None)
    assert (compiled.load() is None) == (request.param == "python")


@pytest.fixture
def context() -> Iterator[Any]:
    """A slice context, with the overrides installed."""
    from ds_terapipe.pipeline.operators import context, sdpa

    sdpa.Overrides.acquire()
    yield context.SliceContext()
    sdpa.Overrides.release()
