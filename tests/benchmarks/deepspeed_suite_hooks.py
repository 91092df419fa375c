"""What is imported in every process of DeepSpeed's tests: it puts our key into the configurations and writes down what ran.

A pytest plugin in the process that collects the tests, and a wrapper around ``deepspeed.initialize`` in those that run them.
``deepspeed_suite.py`` copies it beside the tests and reads what it writes into the folder ``DEEPSPEED_SUITE_FOLDER``:
``outcomes``, a line of JSON for each test, and ``events``, one for each engine that a rank built or batch that it ran.
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
import torch

FOLDER = "DEEPSPEED_SUITE_FOLDER"
BLOCK = "DEEPSPEED_SUITE_BLOCK"  # the block token_pipeline; absent where DeepSpeed runs by itself
KEY = "token_pipeline"
INJECTED, BUILT = "key", "engine"  # events, beside the batches
BATCHES = ("train_batch", "eval_batch")
_OUTPUT_KEPT = 2000  # characters of a test that failed


def pytest_runtest_setup(item: Any) -> None:
    """Tells the processes of a test which one they run: they may come from a server that was started before it."""
    _file("current").write_text(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """What became of a test, by phase; a test is what its worst phase is."""
    if report.when == "call" or not report.passed:
        text = "\n".join([report.longreprtext, *(content for _, content in report.sections)])
        _append("outcomes", {"test": report.nodeid, "outcome": report.outcome, "text": text[-_OUTPUT_KEPT:]})


def install() -> None:
    """Wrap ``deepspeed.initialize`` of this process."""
    # compiled at first use, for a minute or more, and its shared memory stays behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    block = os.environ.get(BLOCK)
    if block is not None:
        import ds_terapipe

        ds_terapipe.register()
    deepspeed.initialize = _observed(deepspeed.initialize, None if block is None else json.loads(block))


def _observed(initialize: Callable[..., Any], block: dict[str, Any] | None) -> Callable[..., Any]:
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def observed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if block is not None:
            config = given.arguments.get("config")
            if not isinstance(config, dict):
                raise TypeError(
                    f"deepspeed_suite puts its key into a config that is a dict, not {type(config).__name__}"
                )
            given.arguments["config"] = {**config, KEY: block}
            _append_event(INJECTED, "")
        result = initialize(*given.args, **given.kwargs)
        engine = result[0]
        kind = type(engine).__name__
        _append_event(BUILT, kind)
        for name in BATCHES:
            if hasattr(engine, name):
                setattr(engine, name, _counted(getattr(engine, name), name, kind))
        return result

    return observed


def _counted(method: Callable[..., Any], name: str, kind: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        _append_event(name, kind)
        return result

    return counted


def _append_event(event: str, engine: str) -> None:
    rank = torch.distributed.get_rank()
    _append("events", {"test": _file("current").read_text(), "event": event, "engine": engine, "rank": rank})


def _file(name: str) -> Path:
    return Path(os.environ[FOLDER], name)


def _append(name: str, line: dict[str, Any]) -> None:
    """One write, so that lines of several processes do not mix."""
    file = os.open(_file(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


if FOLDER in os.environ:
    install()
