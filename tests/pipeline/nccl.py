"""A stand-in for NCCL's sends and receives on machines without a GPU: who waits for whom is as there, the numbers are not.

As PyTorch 2.13 documents and implements it for a group that is bound to a device: the operations of a group run on a stream of
its own in the order of their issue, each begins when the compute stream has come to where it was issued and ends when its peer
has joined, and ``work.wait()`` makes the compute stream wait and not the caller. Here a stream is a thread. The layers compute at
once, on whatever is in their buffers: what is looked at is the order.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_NEVER_S = 600.0


class Stream:
    """Runs what it is given, one thing after the other, without whoever gives it waiting."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def mark(self) -> Mark:
        """A mark at the end of what the stream was given."""
        mark = Mark()
        self.put(mark.reached.set)
        return mark

    def _run(self) -> None:
        while True:
            self._jobs.get()()


class Mark:
    """A point on a stream, as a CUDA event is."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def is_completed(self) -> bool:
        return self.reached.is_set()


class Work:
    """A message, as ``ProcessGroupNCCL``'s works are."""

    def __init__(self, compute: Stream) -> None:
        self._compute, self.done = compute, threading.Event()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Without a time limit the compute stream waits; with one the caller does."""
        if timeout is None:
            self._compute.put(lambda: _never_in_vain(self.done))
        elif not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for a message")
        return True


class Messages:
    """What takes the place of ``deepspeed.comm`` where messages are sent.

    Args:
        stream_of: what a process group's stream is called; groups of one name share a stream, and so their order.
    """

    def __init__(self, stream_of: Callable[[Any], Hashable]) -> None:
        self.compute, self._stream_of = Stream("compute"), stream_of
        self._streams: dict[Hashable, Stream] = {}
        self._numbers: dict[tuple[Hashable, int, int], int] = defaultdict(int)
        self._names: dict[Hashable, int] = {}
        self.issued = 0

    def isend(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        return self._issue(tensor, peer, group, sends=True)

    def irecv(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        return self._issue(tensor, peer, group, sends=False)

    def _issue(self, tensor: Tensor, peer: int, group: Any, sends: bool) -> Work:
        work, name = Work(self.compute), self._stream_of(group)
        rank = torch.distributed.get_rank()
        key = (name, rank, peer) if sends else (name, peer, rank)
        tag, self._numbers[key] = self._tag(name, self._numbers[key]), self._numbers[key] + 1
        if name not in self._streams:
            self._streams[name] = Stream(f"messages {name}")
        issued_at = self.compute.mark()

        def run() -> None:
            _never_in_vain(issued_at.reached)
            _exchange(tensor, peer, tag, sends)
            work.done.set()

        self._streams[name].put(run)
        self.issued += 1
        return work

    def _tag(self, name: Hashable, number: int) -> int:
        """The same at both ends: names are met in the same order only by luck, so they are numbers or go by their text."""
        return 2 * (1000 * sum(str(name).encode()) + number)


def _exchange(tensor: Tensor, peer: int, tag: int, sends: bool) -> None:
    """One message and its acknowledgement: neither end is through before the other has joined."""
    told = torch.zeros(1)
    if sends:
        torch.distributed.send(tensor, peer, tag=tag)
        torch.distributed.recv(told, peer, tag=tag + 1)
    else:
        torch.distributed.recv(tensor, peer, tag=tag)
        torch.distributed.send(told, peer, tag=tag + 1)


def _never_in_vain(event: threading.Event) -> None:
    event.wait(_NEVER_S)
