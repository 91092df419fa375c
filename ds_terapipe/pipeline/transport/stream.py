"""A device's streams: what has the step's come to, how long does it wait, and one of its own for what comes from the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


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


def take_device(device: torch.device) -> None:
    """Set the device of a new thread; call it first.

    Until then the thread uses the machine's first device, where any CUDA call creates a context of some hundred MB.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Loader:
    """Brings tensors, alone or in tuples, to a device.

    On CUDA by a stream of its own. A copy from ordinary host memory holds the host until its stream has come to it, and on the
    step's stream that would be after everything that the host has issued so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, value: Any) -> Any:
        """The same on the device, which the current stream may use; anything but tensors stays as it is."""
        if self._stream is None:
            return _moved(value, self._device)
        with torch.cuda.stream(self._stream):
            moved = _moved(value, self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in _flat(moved):
            tensor.record_stream(current)
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device).detach()
    if isinstance(value, (tuple, list)):
        return tuple(_moved(item, device) for item in value)
    return value


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _flat(item)


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
        return float(sum(start.elapsed_time(stop) for start, stop in self._pairs)) / 1000.0
