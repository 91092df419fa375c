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
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_NEVER_S = 600.0


class Stream:
    """Runs what it is given, one thing after the other, and its caller does not wait."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.put = self._jobs.put
        threading.Thread(target=self._run, name=name, daemon=True).start()

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


class Work(Mark):
    """A message, as ``ProcessGroupNCCL``'s works are."""

    def __init__(self, compute: Stream) -> None:
        super().__init__()
        self._compute = compute

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Without a time limit the compute stream waits; with one the caller does."""
        if timeout is None:
            self._compute.put(lambda: self.reached.wait(_NEVER_S))
        elif not self.reached.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for a message")
        return True


class Messages:
    """What takes the place of ``deepspeed.comm`` where messages are sent.

    Args:
        stream_of: what a process group's stream is called; groups of one name share a stream, and so their order.
    """

    def __init__(self, stream_of: Callable[[Any], str]) -> None:
        self.compute, self._stream_of = Stream("compute"), stream_of
        self._streams: dict[str, Stream] = {}
        self._numbers: dict[tuple[str, int, int], int] = defaultdict(int)
        self.issued = 0

    def isend(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        return self._issue(tensor, peer, group, torch.distributed.get_rank(), peer)

    def irecv(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        return self._issue(tensor, peer, group, peer, torch.distributed.get_rank())

    def _issue(self, tensor: Tensor, peer: int, group: Any, sender: int, receiver: int) -> Work:
        work, name, issued_at = Work(self.compute), self._stream_of(group), self.compute.mark()
        key = name, sender, receiver
        tag, self._numbers[key] = 2 * (1000 * sum(name.encode()) + self._numbers[key]), self._numbers[key] + 1
        if name not in self._streams:
            self._streams[name] = Stream(f"messages {name}")

        def run() -> None:
            """A message and its acknowledgement: neither end is through before the other has joined."""
            issued_at.reached.wait(_NEVER_S)
            told, sends = torch.zeros(1), sender != peer
            steps = [(torch.distributed.send, tensor, tag), (torch.distributed.recv, told, tag + 1)]
            if not sends:
                steps = [(torch.distributed.recv, tensor, tag), (torch.distributed.send, told, tag + 1)]
            for step, what, number in steps:
                step(what, peer, tag=number)
            work.reached.set()

        self._streams[name].put(run)
        self.issued += 1
        return work
