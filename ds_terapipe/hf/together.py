"""Calls that fail on all processes or on none: an error is raised everywhere before any other process waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.job import Job
from ds_terapipe.pipeline.transport import watchdog

_Made = TypeVar("_Made")
_SILENT_S = 600.0  # after which a process that says nothing is given up


def together(make: Callable[[], _Made], one_first: bool = False) -> _Made:
    """Return the result of ``make``, or raise any process's error on every process; collective.

    ``one_first``: on each node one process before the others, which find what it has fetched.
    """
    made: list[_Made] = []

    def attempt() -> None:
        try:
            made.append(make())
        except ConfigError:
            raise
        except Exception as problem:
            raise ConfigError(f"hf: got {one_line(problem)}, must be a model that can be read and written") from problem

    job, first = Job.current(), os.environ.get("LOCAL_RANK", "0") == "0"
    with watchdog.launching(_SILENT_S, "all ranks to read or write the model"):
        if one_first:
            job.together(lambda: attempt() if first else None)
        job.together(lambda: None if made else attempt())
    return made[0]
