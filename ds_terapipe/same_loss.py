"""Losses of the first steps of a launch, with our blocks of the configuration or without: one of the two runs of
``ds_terapipe same-loss``, which asks for it by an environment variable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .arguments import replaced_configuration
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


def initialize(inner: Callable[..., Any], config: Mapping[str, Any] | None, given: dict[str, Any]) -> Any:
    """Call ``inner``, our ``deepspeed.initialize``, and record the losses of its engine.

    Args:
        inner: the function.
        config: the configuration that it would read; None for one that DeepSpeed has to complain about.
        given: its arguments.

    Raises:
        ConfigError: neither block is on, so that both runs would be the same; the engine has no ``train_batch``.
    """
    asked = Asked(*json.loads(os.environ[SAME_LOSS]))
    if config is not None and not any(is_on(config, key) for key in KEYS):
        names = " and ".join(KEYS)
        raise ConfigError(f'same-loss: got a launch without {names}, must have one of them, use e.g. "{KEYS[0]}": {{}}')
    if config is not None and not asked.keys:
        off = {name: {**config[name], "enabled": False} for name in KEYS if isinstance(config.get(name), Mapping)}
        with replaced_configuration(given, {**config, **off}):
            result = inner(**given)
    else:
        result = inner(**given)
    _record(result[0], asked)
    return result


def _record(engine: Any, asked: Asked) -> None:
    if not hasattr(engine, "train_batch"):
        raise ConfigError(f"same-loss: got a {type(engine).__name__}, must have train_batch, use a PipelineModule")
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
