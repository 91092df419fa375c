"""What is imported in every process of DeepSpeed's tests: it puts our key into the configurations and writes down what ran.

A pytest plugin in the process that collects the tests, and a wrapper around ``deepspeed.initialize`` in those that run them.
``deepspeed_suite.py`` copies it beside the tests and reads what it writes into the folder ``DEEPSPEED_SUITE_FOLDER``.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed

FOLDER, BLOCK = (
    "DEEPSPEED_SUITE_FOLDER",
    "DEEPSPEED_SUITE_BLOCK",
)  # the block token_pipeline, absent where DeepSpeed runs by itself
BUILT, BATCHES = "engine", ("train_batch", "eval_batch")


def pytest_runtest_setup(item: Any) -> None:
    """Tells the processes of a test which one they run: they may come from a server that was started before it."""
    Path(os.environ[FOLDER], "current").write_text(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """What became of a test, by phase."""
    if report.when == "call" or not report.passed:
        note("outcomes", test=report.nodeid, outcome=report.outcome, text=report.longreprtext[-2000:])


def observed(initialize: Callable[..., Any], block: dict[str, Any] | None) -> Callable[..., Any]:
    """``deepspeed.initialize`` with the key in its configuration; engines that it builds and batches that they run
    are noted."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if block is not None:
            config = given.arguments.get("config")
            if not isinstance(config, dict):
                raise TypeError(f"config: got {type(config).__name__}, must be a dict for the key to go into")
            given.arguments["config"] = {**config, "token_pipeline": block}
        result = initialize(*given.args, **given.kwargs)
        engine = result[0]
        happened(BUILT, engine)
        for name in BATCHES:
            if hasattr(engine, name):
                setattr(engine, name, counted(getattr(engine, name), name, engine))
        return result

    return wrapped


def counted(method: Callable[..., Any], name: str, engine: Any) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        happened(name, engine)
        return result

    return wrapped


def happened(event: str, engine: Any) -> None:
    test = Path(os.environ[FOLDER], "current").read_text()
    note("events", test=test, event=event, engine=type(engine).__name__)


def note(name: str, **line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    file = os.open(Path(os.environ[FOLDER], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


if FOLDER in os.environ:
    # compiled at first use, for a minute or more, and its shared memory stays behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if BLOCK in os.environ:
        import ds_terapipe

        ds_terapipe.register()
    deepspeed.initialize = observed(deepspeed.initialize, json.loads(os.environ.get(BLOCK, "null")))
