"""Losses of the first steps of a launch, with our blocks of the configuration or without: one of the two runs of
``ds_terapipe same-loss``, which asks for it by an environment variable.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import ConfigError
from .names import KEYS, SAME_LOSS, is_on


class Asked(NamedTuple):
    """Text of the environment variable, as JSON.

    Attributes:
        path: file to which rank 0 adds a line with each loss.
        steps: so many are trained, then the launch ends.
        keys: whether our blocks count; they are as with ``"enabled": false`` otherwise.
    """

    path: str
    steps: int
    keys: bool


def initialize(
    inner: Callable[..., Any], config: Mapping[str, Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``inner``, our ``deepspeed.initialize``, and record the losses of its engine.

    Args:
        inner: the function.
        config: the configuration that it would read; None for one that DeepSpeed has to complain about.
        args, kwargs: its arguments.

    Raises:
        ConfigError: neither block is on, so that both runs would be the same; the engine has no ``train_batch``.
    """
    asked = Asked(*json.loads(os.environ[SAME_LOSS]))
    if config is not None and not any(is_on(config, key) for key in KEYS):
        names = " and ".join(KEYS)
        raise ConfigError(f'same-loss: got a launch without {names}, must have one of them, use e.g. "{KEYS[0]}": {{}}')
    if config is None or asked.keys:
        result = inner(*args, **kwargs)
    else:
        given = dict(inspect.signature(inner).bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        result = inner(**_without_keys(given, config))
    _record(result[0], asked)
    return result


def _without_keys(given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with our blocks switched off; the user's own objects stay as they are."""
    off = {name: {**(config[name] or {}), "enabled": False} for name in KEYS if isinstance(config.get(name), Mapping)}
    given.pop("config_params", None)
    if (args := given.get("args")) is not None:
        given["args"] = args = copy.copy(args)
        for name in ("deepspeed_config", "deepscale_config"):
            if getattr(args, name, None) is not None:
                setattr(args, name, None)
    return {**given, "config": {**config, **off}}


def _record(engine: Any, asked: Asked) -> None:
    if not hasattr(engine, "train_batch"):
        raise ConfigError(
            f"same-loss: got a {type(engine).__name__}, must be an engine with train_batch, of a PipelineModule"
        )
    train, done = engine.train_batch, 0

    def train_batch(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        loss = train(*args, **kwargs)
        done += 1
        if engine.global_rank == 0:
            with open(asked.path, "a", encoding="utf-8") as file:
                file.write(f"{float(loss)!r}\n")
        if done == asked.steps:
            raise SystemExit(0)
        return loss

    engine.train_batch = train_batch
