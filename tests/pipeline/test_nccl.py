"""On NCCL, where a group's messages run one behind the other and no wait holds the host: no lock-up, and reports as ever.

A stand-in for NCCL's sends and receives, where there is no GPU: who waits for whom is as there, the numbers are not. As
PyTorch 2.13 has it for a group that is bound to a device, the operations of a group run on a stream of its own in the
order of their issue. Each begins when the compute stream has come to where it was issued and ends when its peer has
joined. ``work.wait()`` makes the compute stream wait and not the caller. Here a stream is a thread. The layers compute
at once, on whatever is in their buffers.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from ds_terapipe.pipeline.transport import p2p as links_module
from ds_terapipe.pipeline.transport.p2p import BoundarySpec
from ds_terapipe.schedule import Action, Op, Unit, order, stream_deadlock, with_messages, with_weight_gradients
from ds_terapipe.schedule.streams import group_per_direction
from tests.pipeline.models import gpt, mean_loss, micro_batch
from tests.pipeline.training import build_engine
from tests.spawn import Exit, mark, run_to_exit

STAGES, MICRO_BATCHES, SLICES, STEPS = 3, 2, 4, 2
TIMEOUT_S, NEVER_S = 4.0, 600.0
EXIT_CODE = 70  # see watchdog.py
GRID = with_weight_gradients(with_messages(order("1f1b", STAGES, [SLICES] * MICRO_BATCHES)))


# ---------------------------------------------------------------------------------------------------------- the stand-in


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

    def __init__(self, stream_of: Callable[[Any], str]) -> None:
        self.compute, self._stream_of = Stream("compute"), stream_of
        self._streams: dict[str, Stream] = {}
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

        if name not in self._streams:
            self._streams[name] = Stream(f"messages {name}")
        self._streams[name].put(run)
        self.issued += 1
        return work


# --------------------------------------------------------------------------------------------------------------- the runs


def install(engine: Any, shared: bool) -> Messages:
    """Let the engine's messages go through the stand-in. ``shared``: as before each channel had a group, one per direction."""
    streams: dict[int, str] = {}
    for channel, group in engine._assembly._channels._groups.items():
        streams[id(group)] = f"forward {channel.forward}" if shared else f"{channel}"
    messages, decode = Messages(lambda group: streams[id(group)]), BoundarySpec.decode

    def decode_when_there(meta: torch.Tensor) -> BoundarySpec:
        messages.compute.mark().reached.wait()  # on a device, reading a tensor waits for its stream
        return decode(meta)

    BoundarySpec.decode = decode_when_there
    links_module.dist = messages
    engine._watchdog._new_mark = messages.compute.mark
    return messages


def train(rank: int, world_size: int, shared: bool, stops: bool) -> None:
    """Two steps; then what the host has issued must come to its end. ``stops``: the first stage never sends its last outputs."""
    engine = build_engine(
        gpt(2 * world_size - 2), mean_loss, micro_batches=MICRO_BATCHES, stages=world_size,
        token_pipeline={"slices": SLICES, "schedule": "1f1b", "verify": False, "timeout_s": TIMEOUT_S},
    )  # fmt: skip
    data = [micro_batch(m, length=24, masked=False) for m in range(MICRO_BATCHES)]
    messages = install(engine, shared)
    for step in range(STEPS):
        if stops and rank == 0 and step == STEPS - 1:
            withhold(messages, after=3 * MICRO_BATCHES)
        engine.train_batch(iter(data))
    mark("issued")
    messages.compute.mark().reached.wait(60)
    mark("through")
    assert messages.issued > STEPS * MICRO_BATCHES * SLICES, "the stand-in carried nothing"
    torch.distributed.barrier()
    engine.destroy()


def withhold(messages: Messages, after: int) -> None:
    """Never let a message go that is sent once ``after`` others are."""
    issue, sent = messages.isend, []

    def isend(*args: Any, **kwargs: Any) -> Any:
        sent.append(args)
        if len(sent) > after:
            messages.compute.put(lambda: time.sleep(120))
        return issue(*args, **kwargs)

    messages.isend = isend  # type: ignore[method-assign]


RUNS = {  # whether channels share a group, whether the first stage stops
    "a group per channel": (False, False),
    "a group per direction": (True, False),
    "withheld": (False, True),
}


@pytest.fixture(scope="module")
def exits() -> dict[str, list[Exit]]:
    with ThreadPoolExecutor(3) as pool:
        runs = {name: pool.submit(run_to_exit, train, STAGES, *run, timeout=150.0) for name, run in RUNS.items()}
        return {name: run.result() for name, run in runs.items()}


def test_a_group_per_channel_comes_to_its_end(exits):
    for end in exits["a group per channel"]:
        assert end.code == 0, end.output
        assert end.mark("through") >= end.mark("issued")


def test_a_group_per_direction_locks_up_and_is_reported(exits):
    assert stream_deadlock(GRID, group_per_direction)
    said = rf"waited .* s for .* from rank .* in step .*: no answer .token_pipeline.timeout_s is {TIMEOUT_S:g}."
    for end in exits["a group per direction"]:
        assert end.code == EXIT_CODE and re.search(said, end.output), end.output


def test_a_message_that_never_comes_is_reported_by_what_the_stream_has_done(exits):
    missing = Action(Op.RECV_FORWARD, 1, Unit(*divmod(3 * MICRO_BATCHES, SLICES)))
    for end in exits["withheld"]:
        assert end.code == EXIT_CODE, end.output
        assert end.mark("issued")  # no host has waited
    told = exits["withheld"][1].output
    assert f"for activations of {missing.unit} from rank 0 in step {STEPS - 1}: no answer" in told
    marked = [line for line in told.splitlines() if "<-- stage 1" in line]
    assert f"[{missing}]" in marked[0] and missing in GRID[1][:-1]
