"""Processes that stay alive between measurements and do what the benchmark asks of them, one request at a time."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.spawn import free_port

# The environment is read at a child's start. The baselines run without our hook in DeepSpeed. In every column glibc keeps
# what a step frees for the next one: by itself it gives large blocks back, and zeroes thousands of pages anew in every step.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "DS_TERAPIPE_AUTOLOAD": "0",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # bytes of a block; the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),  # bytes free at the end of the heap, before any is given back
}


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorkerError(RuntimeError):
    """A worker raised, died or did not answer in time; its whole group has been ended."""


@dataclass
class Seat:
    """What a request finds in its worker: who it is, and the training step that an earlier request left there."""

    rank: int
    world: int
    imported_mb: float
    step: Callable[..., Any] | None = None


@dataclass(frozen=True)
class PeakMemory:
    """Memory of one worker since it was started, in MB (2**20 bytes): at its highest, and before it built its model."""

    highest_mb: float
    imported_mb: float


def _resident_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def peak_memory(seat: Seat) -> PeakMemory:
    """Request: the worker's peak memory so far."""
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return PeakMemory(highest, seat.imported_mb)


def use_checkout(path: str) -> None:
    """Let this process take ds_terapipe from another checkout; what it has imported of it already is forgotten."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ds_terapipe"]:
        del sys.modules[name]
    sys.path.insert(0, path)
    found = importlib.import_module("ds_terapipe").__file__ or ""
    if not Path(found).is_relative_to(Path(path).resolve()):
        raise WorkerError(f"ds_terapipe is taken from {found}, not from {path}")


def _serve(
    rank: int, world: int, connection, settings: dict[str, str], modules: Sequence[str], log: str, checkout: str | None
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped worker would not see its parent's end
    with open(log, "ab", buffering=0) as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    os.environ.update(settings, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    seat: Seat | None = None
    try:
        import torch
        import torch._dynamo  # 90 MB that optimisers import lazily: in every column before memory is first looked at

        torch.set_num_threads(1)
        if checkout is not None:
            use_checkout(checkout)
        for name in modules:
            importlib.import_module(name)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(minutes=10))
        seat = Seat(rank, world, _resident_mb())
        connection.send((True, None))
        while True:
            function, arguments = connection.recv()
            connection.send((True, function(seat, *arguments)))
    except EOFError:
        pass  # the benchmark is done, or has been killed
    except BaseException:
        connection.send((False, traceback.format_exc()))
    # The other ranks may be gone: the orderly end of the process group would wait for them.
    os._exit(0)


class Workers:
    """A process group of ``world`` workers. Use as a context manager: no worker outlives it.

    ``checkout``: a folder that ds_terapipe is taken from, instead of the package that the benchmark belongs to.
    """

    def __init__(
        self,
        world: int,
        modules: Sequence[str] = (),
        log: str = os.devnull,
        timeout: float = 300.0,
        checkout: str | None = None,
    ):
        self.world = world
        self.timeout = timeout
        os.environ.update(ENVIRONMENT)
        self._port = free_port()
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        context = multiprocessing.get_context("spawn")
        self._connections: list[multiprocessing.connection.Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, theirs, settings, tuple(modules), log, checkout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._pending: list[Sequence[int]] = [range(world)]  # every worker reports once that it is ready

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every worker, whatever it is doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        # DeepSpeed leaves 66 MB of shared memory behind on CPU, for each process: after some benchmarks the machine has none
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):
            buffer.unlink(missing_ok=True)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the workers run within the block alone. Idle ones take 1% of a core each (allocators, process groups): a
        fleet of twenty would slow the two that work by more than what is measured."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def post(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> None:
        """Ask ``ranks`` (all by default) for ``function(seat, *arguments)`` without waiting for the answers."""
        chosen = range(self.world) if ranks is None else ranks
        try:
            for rank in chosen:
                self._connections[rank].send((function, arguments))
        except OSError:
            pass  # the worker has died: collecting its answer says so
        self._pending.append(chosen)

    def collect(self) -> list[Any]:
        """Wait for everything posted so far; the answers of the last request, one per rank asked."""
        answers: list[Any] = []
        for ranks in self._pending:
            answers = self._answers(ranks)
        self._pending = []
        return answers

    def call(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """``post`` and ``collect``."""
        self.post(function, *arguments, ranks=ranks)
        return self.collect()

    def _answers(self, ranks: Sequence[int]) -> list[Any]:
        waiting = {self._connections[rank]: rank for rank in ranks} if self._connections else {}
        if not waiting:
            raise WorkerError("the workers have already ended")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} did not answer within {self.timeout:.0f} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    good, value = connection.recv()
                except (EOFError, ConnectionError):
                    self._fail(f"rank {rank} died without a word, exit code {self._exit_code(rank)}")
                if not good:
                    self._fail(f"rank {rank}: {value}")
                answers[rank] = value
        return [answers[rank] for rank in ranks]

    def _exit_code(self, rank: int) -> int | None:
        self._processes[rank].join(5)
        return self._processes[rank].exitcode

    def _fail(self, message: str) -> None:
        self.close()
        raise WorkerError(message)
