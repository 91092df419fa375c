"""Use of an engine after its end: after an error in the middle of a step, or after ``destroy()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_terapipe.pipeline.teardown import check_open
from ds_terapipe.pipeline.transport.watchdog import Watchdog

DESTROYED = "destroy() was called"


@contextmanager
def poison_on_error(watchdog: Watchdog) -> Iterator[None]:
    """Context manager for code that leaves messages, partial gradients or a partial step behind when it fails."""
    try:
        yield
    except BaseException as error:
        watchdog.failed(error)
        raise


def refuse_ended(engine: Any) -> None:
    """Raise RuntimeError with the reason if an engine has ended, ConfigError if its module has with another engine."""
    watchdog = engine._watchdog
    if watchdog.ended == DESTROYED:
        raise RuntimeError(f"this engine is no longer usable ({DESTROYED}): build another one, on a module of its own")
    if watchdog.ended:
        raise RuntimeError(
            f"this engine is no longer usable ({watchdog.ended}): a step that did not come to its end leaves messages "
            "and gradients in no known state; end the processes, restart and load the last checkpoint"
        )
    check_open(engine.module)
