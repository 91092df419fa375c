"""Streams of a device: progress marks, and a separate stream for copies from the host."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ds_terapipe.pipeline.slicing import tensors_in


class Mark(Protocol):
    """A progress mark on a device's stream."""

    def is_completed(self) -> bool:
        """Whether the stream has reached it; called from another thread."""


class StreamMark:
    """A :class:`Mark` on CUDA's current stream; an event, since a message's work would keep its tensor alive."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_completed(self) -> bool:
        """Whether the stream has reached it; True after an error on the device, which the host sees itself."""
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
    """Copies tensors, alone or in tuples, to a device.

    On CUDA it has its own stream. A copy from ordinary host memory blocks the host until its stream reaches it; on the
    step's stream that would be after all work issued so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, value: Any) -> Any:
        """Return the value on the device, ready for the current stream; only tensors are copied."""
        if self._stream is None:
            return _moved(value, self._device)
        with torch.cuda.stream(self._stream):
            moved = _moved(value, self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors_in(moved):
            tensor.record_stream(current)
        return moved


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device).detach()
    if isinstance(value, (tuple, list)):
        return tuple(_moved(item, device) for item in value)
    return value
