"""A function applied to tasks by several processes, with results in the order of the tasks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from ds_terapipe.errors import ConfigError

AHEAD = 4  # tasks that each worker may be ahead of the first result that is not there: a bound of memory
Task = TypeVar("Task")
Result = TypeVar("Result")


def in_order(function: Callable[[Task], Result], tasks: Iterable[Task], workers: int) -> Generator[Result, None, None]:
    """The results of all tasks; one worker is this process.

    Raises:
        ConfigError: a worker has died.
    """
    if workers == 1:
        yield from map(function, tasks)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin)
    waiting: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(function, task))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)
    except BrokenProcessPool as error:
        raise ConfigError(
            f"--workers: got {workers}, of which one was killed (no memory?), must fit, use fewer"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Leave interrupts to the parent, use one core, and end with the parent, even where that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
