"""Imported in every process of DeepSpeed's tests: puts our key into the configurations and writes down what ran.

A pytest plugin in the process that collects the tests, and a wrapper around ``deepspeed.initialize`` in those that run them.
``deepspeed_suite.py`` copies it beside the tests and reads what it writes into the folder ``DEEPSPEED_SUITE_FOLDER``.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed

# of the second: the block token_pipeline, or null where DeepSpeed runs by itself
FOLDER, BLOCK = "DEEPSPEED_SUITE_FOLDER", "DEEPSPEED_SUITE_BLOCK"
BATCHES = ("train_batch", "eval_batch")


def pytest_runtest_setup(item: Any) -> None:
    """Tells the processes of a test which one they run: they may come from a server that was started before it."""
    Path(os.environ[FOLDER], "current").write_text(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """What became of a test, by phase."""
    if report.when == "call" or not report.passed:
        note("outcomes", test=report.nodeid, outcome=report.outcome, text=report.longreprtext[-2000:])


def noted(function: Callable[..., Any], event: str, block: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The function, with the key in its argument ``config``; its calls are written down with the class of the engine."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if block is not None:
            kwargs["config"] = {**kwargs["config"], "token_pipeline": block}
        result = function(*args, **kwargs)
        engine = getattr(function, "__self__", None) or result[0]
        test = Path(os.environ[FOLDER], "current").read_text()
        note("events", test=test, event=event, engine=type(engine).__name__)
        for name in BATCHES if event == "engine" else ():
            if hasattr(engine, name):
                setattr(engine, name, noted(getattr(engine, name), name))
        return result

    return wrapped


def note(name: str, **line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    file = os.open(Path(os.environ[FOLDER], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


if FOLDER in os.environ:
    # compiled at first use, for a minute or more, and its shared memory stays behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    key = json.loads(os.environ[BLOCK])
    if key is not None:
        import ds_terapipe

        ds_terapipe.register()
    deepspeed.initialize = noted(deepspeed.initialize, "engine", key)
