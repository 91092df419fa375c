"""On NCCL, with many hardware queues or one: a step comes to its end, and one that cannot is reported.

A stand-in for NCCL's sends and receives, where there is no GPU: who waits for whom is as there, the numbers are not. As
PyTorch 2.13 has it for a group that is bound to a device, the operations of a group run on a stream of its own in the
order of their issue. Each begins when the compute stream has come to where it was issued and ends when its peer has
joined. ``work.wait()`` makes the compute stream wait and not the caller. Here a stream is a thread. With one hardware
queue all that a rank issues goes through one thread, which a message holds until its stream's last one has ended. The
layers compute at once, on whatever is in their buffers.
"""

from __future__ import annotations

import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch import Tensor

from ds_terapipe.pipeline.transport import p2p as links_module
from ds_terapipe.schedule import POSTED_AHEAD, order, with_messages, with_weight_gradients
from ds_terapipe.schedule.hardware_queue import queue_deadlock
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine
from tests.spawn import Exit, in_background, mark, run_to_exit

STAGES, MICRO_BATCHES, SLICES, STEPS = 3, 2, 4, 2
TIMEOUT_S, NEVER_S = 8.0, 600.0
EXIT_CODE = 70  # see watchdog.py
GRID = with_weight_gradients(with_messages(order("1f1b", STAGES, [SLICES] * MICRO_BATCHES)))


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
            self._compute.put(lambda: self.reached.wait(NEVER_S))
        elif not self.reached.wait(timeout.total_seconds()):
            raise RuntimeError("Timed out waiting for a message")
        return True


class Messages:
    """Stand-in for ``deepspeed.comm``; groups whose streams have one name share a stream, and so their order."""

    def __init__(self, stream_of: Callable[[Any], str], one_queue: bool) -> None:
        self.compute, self._stream_of, self._one_queue = Stream("compute"), stream_of, one_queue
        self._streams: dict[str, Stream] = {}
        self._last: dict[str, Work] = {}  # of each stream
        self._numbers: dict[tuple[str, int, bool], int] = defaultdict(int)
        self.issued = 0

    def isend(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        return self._issue(tensor, peer, self._stream_of(group), sends=True)

    def irecv(self, tensor: Tensor, peer: int, group: Any = None) -> Work:
        return self._issue(tensor, peer, self._stream_of(group), sends=False)

    def _issue(self, tensor: Tensor, peer: int, name: str, sends: bool) -> Work:
        work, issued_at, key = Work(self.compute), self.compute.mark(), (name, peer, sends)
        tag, self._numbers[key] = 2 * (1000 * sum(name.encode()) + self._numbers[key]), self._numbers[key] + 1

        def run() -> None:
            """A message and its acknowledgement: neither end is through before the other has joined."""
            issued_at.reached.wait(NEVER_S)
            step, back = torch.distributed.send, torch.distributed.recv
            step, back = (step, back) if sends else (back, step)
            step(tensor, peer, tag=tag)
            back(torch.zeros(1), peer, tag=tag + 1)
            work.reached.set()

        last, self._last[name] = self._last.get(name), work

        def dispatch() -> None:
            if last is not None:
                last.reached.wait(NEVER_S)
            threading.Thread(target=run, name=f"message {name}", daemon=True).start()

        if self._one_queue:
            self.compute.put(dispatch)
        else:
            if name not in self._streams:
                self._streams[name] = Stream(f"messages {name}")
            self._streams[name].put(run)
        self.issued += 1
        return work


class Run(NamedTuple):
    """How messages go.

    Attributes:
        one_queue: all streams of a rank share a hardware queue.
        ahead: receives that are posted before their turn.
    """

    one_queue: bool = False
    ahead: int = POSTED_AHEAD


def install(engine: Any, run: Run) -> Messages:
    """Let the engine's messages go through the stand-in."""
    streams = {id(group): f"{channel}" for channel, group in engine._runtime._channels._groups.items()}
    messages = Messages(lambda group: streams[id(group)], run.one_queue)
    links_module.dist, links_module.POSTED_AHEAD = messages, run.ahead  # type: ignore[assignment]
    engine._watchdog._new_mark = messages.compute.mark
    return messages


def train(rank: int, world_size: int, *how: Any) -> None:
    """Two steps; then what the host has issued must come to its end."""
    run = Run(*how)
    engine = build_engine(
        gpt(2 * world_size - 2), mean_loss, micro_batches=MICRO_BATCHES, stages=world_size,
        token_pipeline={"slices": SLICES, "schedule": "1f1b", "verify": False, "timeout_s": TIMEOUT_S},
    )  # fmt: skip
    data = [micro_batch(m, length=24, masked=False) for m in range(MICRO_BATCHES)]
    messages = install(engine, run)
    for _ in range(STEPS):
        engine.train_batch(iter(data))
    mark("issued")
    messages.compute.mark().reached.wait(60)
    mark("through")
    assert messages.issued > STEPS * MICRO_BATCHES * SLICES, "the stand-in carried nothing"
    torch.distributed.barrier()
    engine.destroy()


RUNS = {"a group per channel": Run(), "one queue": Run(one_queue=True), "one queue, two ahead": Run(one_queue=True, ahead=2)}


def all_exits() -> dict[str, list[Exit]]:
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(run_to_exit, train, STAGES, *run, timeout=150.0) for name, run in RUNS.items()}
        return {name: run.result() for name, run in runs.items()}


exits = in_background(f"{__name__}:exits", STAGES, all_exits)


@pytest.mark.parametrize("run", ["a group per channel", "one queue"])
def test_a_step_comes_to_its_end(exits, run):
    for end in exits[run]:
        assert end.code == 0, end.output
        assert end.mark("through") >= end.mark("issued")


def test_a_step_that_locks_up_is_reported(exits):
    assert queue_deadlock(GRID, posted_ahead=2)
    awaited = r"for (.* from rank|rank \d to take)"
    said = rf"waited .* s {awaited} .* in step .*: no answer .token_pipeline.timeout_s is {TIMEOUT_S:g}."
    for end in exits["one queue, two ahead"]:
        assert end.code == EXIT_CODE and re.search(said, end.output), end.output
