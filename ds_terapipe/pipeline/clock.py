"""Clock of a device: what runs on a stream is timed there, what runs on the host by the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Times of work on a device.

    On CUDA a mark is an event on the current stream, so the host only enqueues it. Elsewhere it is ``time.perf_counter()``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_stream = device, device.type == "cuda"

    def now(self) -> Any:
        """Return a mark."""
        if not self._on_stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any, start: Any) -> float:
        """Return the seconds from mark ``start`` to ``mark``, after the stream has reached it."""
        if not self._on_stream:
            return float(mark - start)
        mark.synchronize()
        return float(start.elapsed_time(mark)) / 1000.0

    def wait(self) -> None:
        """Wait until the device has done all work: a mark is now then, on the host as well."""
        if self._on_stream:
            torch.cuda.synchronize(self._device)


class Waits:
    """Time that a CUDA stream waits for messages in a step; waits block the stream, not the host."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pairs: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a step: reset the time."""
        self._pairs.clear()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Context manager around one wait."""
        begin = self._clock.now()
        yield
        self._pairs.append((begin, self._clock.now()))

    def take_s(self) -> float:
        """Return the seconds since the step began. Synchronizes."""
        self._clock.wait()
        return sum(self._clock.seconds(end, begin) for begin, end in self._pairs)
