"""Log lines of a resumed training: settings and samples that differ from the configuration's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.pipeline.parameter_groups import settings_of

logger = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, tuple, list, type(None))


@contextmanager
def resuming(engine: Any) -> Iterator[None]:
    """Context manager around ``load_checkpoint``: rank 0 logs settings that differ, another optimizer is an error."""
    before, step = _groups(engine), engine.global_steps
    yield
    _check_kind(engine.basic_optimizer, before)
    if engine.global_rank == 0 and engine.global_steps != step:
        _say_settings(engine, before)
        _say_samples(engine, "goes on where it is" if step else "begins at its first sample again")


def _check_kind(optimizer: Any, before: list[dict[str, Any]]) -> None:
    """Refuse groups of another optimizer, with which the next step would fail. Raises ConfigError."""
    for given, loaded in zip(before, getattr(optimizer, "param_groups", ()), strict=False):
        if lost := sorted((given.keys() & optimizer.defaults.keys()) - loaded.keys()):
            raise ConfigError(
                f"load_checkpoint: got the state of an optimizer without {lost[0]}, must be of {type(optimizer).__name__}, use "
                "load_optimizer_states=False, and a new engine"
            )


def _say_samples(engine: Any, goes_on: str) -> None:
    if engine.training_dataloader is None or engine.continues_data or hasattr(engine.lr_scheduler, "seek"):
        return
    logger.warning(
        "load_checkpoint: training_data %s, as in DeepSpeed, not behind the %d samples that were read; "
        'to go on there, use "elastic_pipeline": {"resize": {"policy": "off"}}',
        goes_on,
        engine.global_samples,
    )


def _groups(engine: Any) -> list[dict[str, Any]]:
    groups = [] if engine.basic_optimizer is None else engine.basic_optimizer.param_groups
    return [settings_of(group) for group in groups]


def _say_settings(engine: Any, configured: list[dict[str, Any]]) -> None:
    """Log settings that the checkpoint's optimizer replaced; a scheduler may keep its own."""
    scheduler = engine.lr_scheduler
    found: dict[str, str] = {}
    ignored = {"step"}  # a count
    if scheduler is not None:
        ignored |= {"lr"} if hasattr(scheduler, "base_lrs") else {"lr", "initial_lr"}
    for given, loaded in zip(configured, _groups(engine), strict=False):
        for key in (given.keys() & loaded.keys()) - ignored - found.keys():
            before, now = shown(given[key]), shown(loaded[key])
            if isinstance(loaded[key], _PLAIN) and loaded[key] != given[key] and now != before:
                found[key] = f"{'lr' if key == 'initial_lr' else key} {now}, not {before}"
    if not found:
        return
    of_scheduler = scheduler is not None and not hasattr(scheduler, "base_lrs")
    rest = f"; the LR is that of {type(scheduler).__name__} as configured now" if of_scheduler else ""
    logger.warning(
        "load_checkpoint: the settings of the checkpoint's optimizer count, not those of this engine's: %s%s",
        "; ".join(found[key] for key in sorted(found)),
        rest,
    )
