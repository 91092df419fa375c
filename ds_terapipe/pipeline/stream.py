"""What a device's stream has come to, and how long it waits: there a wait holds the stream and not the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Mark(Protocol):
    """A point on a device's stream."""

    def is_completed(self) -> bool:
        """Whether the stream has come to it; asked from another thread."""


class StreamMark:
    """A :class:`Mark` on CUDA's current stream. An event and not a message's work, which would keep its tensor alive."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_completed(self) -> bool:
        """Whether the stream has come to it; after an error on the device, which the host meets by itself, it has."""
        try:
            return bool(self._event.query())
        except RuntimeError:
            return True


class StreamClock:
    """Time that a CUDA stream spends waiting for messages in a step: there, waiting blocks the stream and not the host."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """A step begins: what is known of the last one is forgotten."""
        self._pairs.clear()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Bracket one wait by events on the current stream."""
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        yield
        pair[1].record()
        self._pairs.append(pair)

    def take_s(self) -> float:
        """Seconds since the step began. Synchronises."""
        torch.cuda.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in self._pairs) / 1000.0
