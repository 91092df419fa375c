"""Launches beside the tests: those of all selected tests start when collection is over, in the order of the tests.

Ranks that wait for each other leave cores idle, so launches of four ranks together run side by side, and tests of one process
beside them. Each launch has processes of its own: nothing that one leaves behind, an error least of all, reaches the next.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

RANKS = int(os.environ.get("TESTS_RANKS", "6"))  # at a time


class Room:
    """Limit on the ranks that are alive at a time; a test that waits goes before launches that no test waits for yet."""

    def __init__(self, ranks: int) -> None:
        self._all = self._free = ranks
        self._standing = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, ranks: int, standing: bool = True) -> Iterator[None]:
        """Room for so many, or for all that there are; ``standing``: a test waits for it."""
        ranks = min(ranks, self._all)
        with self._changed:
            self._standing += standing
            self._changed.wait_for(lambda: self._free >= ranks and (standing or not self._standing))
            self._standing -= standing
            self._free -= ranks
        try:
            yield
        finally:
            with self._changed:
                self._free += ranks
                self._changed.notify_all()


class Launch:
    """A launch of ranks, and what ``run()``, which starts them, returns; ``name``: in the list of the slowest."""

    def __init__(self, name: str, world_size: int, run: Callable[[], list[Any]]) -> None:
        self.name, self.world_size, self.seconds = name, world_size, 0.0
        self._run, self._done = run, Future[list[Any]]()
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Whether it is for the caller to run: true once."""
        return self._claimed.acquire(blocking=False)

    def run(self) -> None:
        begin = time.monotonic()
        try:
            self._done.set_result(self._run())
        except BaseException as error:  # raised where a test asks for the results
            self._done.set_exception(error)
        self.seconds = time.monotonic() - begin

    def results(self) -> list[Any]:
        """Return the ranks' results, or raise the launch's error. A launch that has not begun begins now."""
        if self.claim():
            with ROOM.of(self.world_size):
                self.run()
        return self._done.result()


class Pool:
    """Runs launches in threads, one after the other as there is room."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._queue: deque[Launch] = deque()

    def submit(self, launches: list[Launch]) -> None:
        self.launches += launches
        self._queue.extend(launches)
        threading.Thread(target=self._dispatch, name="launches", daemon=True).start()

    def stop(self) -> None:
        self._queue.clear()

    def _dispatch(self) -> None:
        while self._queue:
            launch = self._queue.popleft()
            if launch.claim():
                began = threading.Event()
                threading.Thread(target=self._run, args=(launch, began), name=launch.name, daemon=True).start()
                began.wait()

    @staticmethod
    def _run(launch: Launch, began: threading.Event) -> None:
        with ROOM.of(launch.world_size, standing=False):
            began.set()
            launch.run()


ROOM, POOL = Room(RANKS), Pool()
