"""Ranks that are threads, for what is agreed on by a gathering alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ds_terapipe.errors import ConfigError


class Threads:
    """Threads in place of processes, and what they gather."""

    def __init__(self, count: int) -> None:
        self._count, self._barrier, self._said = count, threading.Barrier(count, timeout=60), [None] * count

    def run(self, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
        """``function(rank, gather)`` of every rank: what it returned, or its error."""

        def one(rank: int) -> Any:
            try:
                return function(rank, lambda value: self.gather(rank, value))
            except ConfigError as error:
                return error

        with ThreadPoolExecutor(self._count) as pool:
            return list(pool.map(one, range(self._count)))

    def gather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks; collective."""
        self._said[rank] = value
        self._barrier.wait()
        everybodys = list(self._said)
        self._barrier.wait()
        return everybodys
