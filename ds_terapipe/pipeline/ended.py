"""Use of an engine after its end: after an error in the middle of a step, or after ``destroy()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


def refuse_ended(watchdog: Watchdog) -> None:
    """Raise RuntimeError with the reason if the engine of this watchdog has ended."""
    if watchdog.ended == DESTROYED:
        raise RuntimeError(f"this engine is no longer usable ({DESTROYED}): build another one, on a module of its own")
    if watchdog.ended:
        raise RuntimeError(
            f"this engine is no longer usable ({watchdog.ended}): a step that did not come to its end leaves messages "
            "and gradients in no known state; end the processes, restart and load the last checkpoint"
        )
