"""Calls that fail on all processes or on none: an error is raised everywhere before any other process waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from ds_terapipe.errors import ConfigError

_Made = TypeVar("_Made")


def together(make: Callable[[], _Made], one_first: bool = False) -> _Made:
    """Return the result of ``make``, or raise the first process's error on every process; collective.

    ``one_first``: on each node one process before the others, which find what it has fetched.
    """
    made: list[_Made] = []
    turns = ("0", None) if one_first else (None,)
    for turn in turns:
        error: str | None = None
        try:
            if not made and turn in (None, os.environ.get("LOCAL_RANK", "0")):
                made = [make()]
        except ConfigError as problem:
            error = str(problem)
        except Exception as problem:
            what = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
            error = f"hf: got {what}, must be a model that can be read and written"
        errors: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(errors, error)
        said = next((one for one in errors if one is not None), None)
        if said is not None:
            raise ConfigError(said)
    return made[0]
