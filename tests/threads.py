"""Ranks that are threads, for what is agreed on by a gathering alone."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any


def on_threads(count: int, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Return ``function(rank, gather)`` of every rank."""
    barrier, said = threading.Barrier(count, timeout=60), [None] * count

    def gather(rank: int, value: Any) -> list[Any]:
        said[rank] = value
        barrier.wait()
        everybodys = list(said)
        barrier.wait()
        return everybodys

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: function(rank, partial(gather, rank)), range(count)))
