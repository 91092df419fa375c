"""Run one function in several gloo processes on this machine and collect what each rank returned or raised.

:func:`launch` and :func:`run_ranks` are for functions that come to an end. :func:`run_to_exit` is for processes that are
killed, stopped or fail: they end by themselves, as a user's script does, and what counts is when, and what they wrote.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import torch.multiprocessing as mp

from tests.mutants import installed, verify_hits
from tests.pool import ROOM, Launch

_ASKING, _STARTING = threading.Lock(), threading.Lock()
LEAVES_AFTER_S = 5.0


@dataclass(frozen=True)
class RankResult:
    """What one rank did: its return value, or the text of its error, or neither when it was killed.

    ``hits``: how often a mutant changed something there, by name (see ``tests.mutants``).
    """

    rank: int
    value: Any = None
    error: str | None = None
    traceback: str = ""
    exit_code: int | None = None
    hits: Mapping[str, int] = field(default_factory=dict)


def free_port() -> int:
    """A TCP port that was free a moment ago.

    Not one of those that the system gives to connections (32768 and up): another test's would take it before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32000)  # hypothesis seeds the module's own
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _join_group() -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays; BF16_Optimizer collects garbage four times, a quarter of a second each, else
    # DeepSpeed's shared-memory all-reduce is compiled at first use, under a lock that a killed test would leave behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=120), auto_mpi_discovery=False, verbose=False)


def _worker(
    rank: int,
    world_size: int,
    env: Mapping[str, str],
    mutant: str | None,
    function: Callable[..., Any],
    args: tuple,
    queue,
) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
    try:
        _join_group()
        with installed(mutant) as hits:
            result = RankResult(rank, value=function(rank, world_size, *args), hits=dict(hits))
        # as bytes: by itself the queue shares every tensor's memory by an open file, of which there may be too many
        sent = pickle.dumps(result)
    except BaseException as error:
        result = RankResult(rank, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        sent = pickle.dumps(result)
    queue.put(sent)
    queue.close()
    queue.join_thread()
    # Rank 0 keeps the store that the others may still be making groups with: a rank stays until `launch` has heard from all
    # of them and ends it. One that failed leaves after a while, so that whoever waits for it gets to know.
    multiprocessing.parent_process().join(None if result.error is None else LEAVES_AFTER_S)
    # Other ranks may already be gone: the orderly shutdown of the process group would wait for them.
    os._exit(0)


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    mutant: str | None = None,
) -> list[RankResult]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` new processes with a process group set up.

    With ``mutant``, a name of ``tests.mutants``, that is in place on every rank, and the results have its hits.

    Returns one result per rank, whatever happened to it. Raises ``TimeoutError`` (after killing every process) when a
    rank neither reported nor died within ``timeout`` seconds. No process outlives the call.
    """
    with ROOM.of(world_size):
        return _launch(function, world_size, args, timeout, env, mutant)


def _launch(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    env: Mapping[str, str] | None = None,
    mutant: str | None = None,
) -> list[RankResult]:
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    with _STARTING:
        previous = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)  # a spawned child, and the fork server, read these before their first import
        context = _context(settings)
        queues = [context.Queue() for _ in range(world_size)]
        try:
            processes = [
                context.Process(
                    target=_worker,
                    args=(rank, world_size, settings, mutant, function, args, queues[rank]),
                    daemon=True,
                )
                for rank in range(world_size)
            ]
            for process in processes:
                process.start()
        finally:
            for name, value in previous.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    try:
        return _collect(processes, queues, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


# What processes would import themselves otherwise, in 5 to 10 s. The server goes without what is not installed.
_PRELOADED = (
    "torch",
    "torch._dynamo",  # by the first optimiser
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by the first engine with ZeRO; it compiles a function
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gemma2", "gpt2")),  # all models need these
    "pytest",
    "hypothesis",
    "ds_terapipe.elastic.engine",
    "tests.pipeline.training",
    "tests.megatron.common",
)


def _context(settings: Mapping[str, str]) -> Any:
    """Where new processes come from: a server that has imported what they use, which takes seconds, and forks.

    It has the settings of its first use. Others, of a GPU test, get interpreters of their own.
    """
    if settings["DS_ACCELERATOR"] != "cpu" or settings["OMP_NUM_THREADS"] != "1":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _collect(processes, queues, timeout: float) -> list[RankResult]:
    deadline = time.monotonic() + timeout
    results: dict[int, RankResult] = {}
    while len(results) < len(processes):
        for rank, (process, queue) in enumerate(zip(processes, queues, strict=True)):
            if rank in results:
                continue
            gone = not process.is_alive()
            if not queue.empty():
                results[rank] = pickle.loads(queue.get())
            elif gone:
                results[rank] = RankResult(rank, error="died without a word", exit_code=process.exitcode)
        if time.monotonic() > deadline:
            missing = sorted(set(range(len(processes))) - set(results))
            known = "\n".join(result.traceback for result in results.values() if result.error)
            raise TimeoutError(f"ranks {missing} did not report within {timeout} s\n{known}")
        time.sleep(0.02)
    return [results[rank] for rank in range(len(processes))]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, **options: Any
) -> list:
    """As :func:`launch`, for functions that must succeed: the ranks' values, or an AssertionError with their tracebacks.

    So is a mutant that changed nothing on any rank (``tests.mutants.NeverRan``).
    """
    results = launch(function, world_size, *args, timeout=timeout, **options)
    return _values(results, options.get("mutant"))


def values_of(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """As :func:`run_ranks`, for a caller that has room for the ranks: the run of a :class:`tests.pool.Launch`."""
    return _values(_launch(function, world_size, args, timeout), None)


def launched(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    folder: bool = False,
    **options: Any,
) -> Any:
    """A fixture of a module: what :func:`run_ranks` returns. The launch begins when collection is over (``tests/pool.py``).

    Args:
        function, world_size, *args, **options: as for :func:`run_ranks`.
        timeout: counts from the launch's own beginning.
        folder: whether ``function`` gets an empty folder as one more argument; it is gone when the launch is over.
    """

    def run() -> list[Any]:
        with tempfile.TemporaryDirectory() if folder else contextlib.nullcontext() as path:
            given = (*args, path) if folder else args
            return _values(_launch(function, world_size, given, timeout, **options), options.get("mutant"))

    launch = Launch(f"{function.__module__}:{function.__name__}", world_size, run)

    def ranks() -> list[Any]:
        return launch.results()

    ranks.launch = launch  # type: ignore[attr-defined]  # for conftest.py
    return pytest.fixture(scope="module")(ranks)


def _values(results: list[RankResult], mutant: str | None) -> list[Any]:
    failed = [f"rank {r.rank}: {r.error}\n{r.traceback}" for r in results if r.error]
    assert not failed, "\n".join(failed)
    verify_hits(mutant, [result.hits for result in results])
    return [result.value for result in results]


# ---------------------------------------------------------------------------------------- processes that end by themselves


@dataclass(frozen=True)
class Exit:
    """How one process ended.

    Attributes:
        rank: its rank.
        code: exit status, negative for a signal; None for one that was still there and had to be killed.
        output: stdout and stderr.
        at: ``time.monotonic()`` when it was gone.
    """

    rank: int
    code: int | None
    output: str
    at: float

    def mark(self, name: str) -> float:
        """The time at which the process called :func:`mark` with this name."""
        lines = [line.split() for line in self.output.splitlines() if line.startswith(f"MARK {name} ")]
        assert lines, f"rank {self.rank} never came to {name!r}:\n{self.output}"
        return float(lines[0][2])


def mark(name: str) -> None:
    """For workers: write down that it is now; see :meth:`Exit.mark`."""
    print(f"MARK {name} {time.monotonic():.3f}", flush=True)


def run_to_exit(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Exit]:
    """Call ``function(rank, world_size, *args)`` in processes that end as scripts do: uncaught errors, then Python's own exit.

    ``args`` go through JSON. After ``timeout`` seconds every process that hangs is killed, with None as exit code. No process
    outlives the call. May be called from several threads.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {"target": f"{function.__module__}:{function.__qualname__}", "args": args, "folder": folder}
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        pids: dict[int, int] = {}
        try:
            for rank in range(world_size):
                ranked = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_SIZE": str(world_size)}
                pids[rank] = _fork({**job, "rank": rank, "env": ranked})
            deadline = time.monotonic() + timeout
            waited_for = [Path(folder, f"{rank}.exit") for rank in range(world_size)]
            while time.monotonic() < deadline and not all(path.exists() for path in waited_for):
                time.sleep(0.02)
            late = [rank for rank in pids if not Path(folder, f"{rank}.exit").exists()]
        finally:
            for pid in pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while not all(Path(folder, f"{rank}.exit").exists() for rank in pids):
            time.sleep(0.02)
        assert not any(psutil.pid_exists(pid) for pid in pids.values())
        return [_exit_of(rank, Path(folder), killed=rank in late) for rank in range(world_size)]


def torchrun(function: Callable[..., Any], world_size: int, *args: Any, until: str, timeout: float = 150.0) -> Exit:
    """As :func:`run_to_exit`, started by torchrun on fresh interpreters; all output together, and the launcher's exit code.

    A worker may stop the launcher (``SIGSTOP``) before it dies: it goes on when the output matches ``until``, and does not end
    the others before they have said a word.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}"]
    command += [f"--master-port={free_port()}", "-m", "tests.spawn"]
    command += [f"{function.__module__}:{function.__qualname__}", json.dumps(args)]
    with tempfile.TemporaryFile() as output:
        launcher = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment())
        seen, deadline = {launcher}, time.monotonic() + timeout
        while launcher.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.update(launcher.children(recursive=True))
                if launcher.status() == psutil.STATUS_STOPPED and re.search(until, _text(output)):
                    launcher.resume()
            time.sleep(0.02)
        code, at = launcher.poll(), time.monotonic()
        left = [process for process in seen if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        launcher.wait()
        assert not left, f"still there: {left}"
        return Exit(-1, code, _text(output), at)


def _text(output: IO[bytes]) -> str:
    """What is in a file that processes are writing to; they share its position, which stays."""
    return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(errors="replace")


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    return {**os.environ, **settings}


def _exit_of(rank: int, folder: Path, killed: bool) -> Exit:
    code, at = json.loads((folder / f"{rank}.exit").read_text())
    return Exit(rank, None if killed else code, (folder / f"{rank}.out").read_text(errors="replace"), at)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """A process that has imported what they use, which takes seconds, and forks one that goes on from there for a job."""
    command = [sys.executable, "-m", "tests.spawn"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())
    atexit.register(server.communicate)  # closes its input, which ends it
    return server


def _fork(job: Mapping[str, Any]) -> int:
    """Have the server fork a process for a job; its id."""
    with _ASKING:
        server = _server()
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline())


def _jobs(children: dict[int, Path]) -> Iterator[dict[str, Any]]:
    """Jobs as they come in; meanwhile, how the children ended is written down."""
    text = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            read = os.read(0, 65536)
            if not read:
                return
            *lines, text = (text + read).split(b"\n")
            yield from map(json.loads, lines)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            path = children.pop(pid)
            path.with_suffix(".new").write_text(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic()]))
            path.with_suffix(".new").rename(path)


def _serve() -> dict[str, Any] | None:
    """Fork a child for every job. Returns the job in the child, and None in the server when there will be no more."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    children: dict[int, Path] = {}
    for job in _jobs(children):
        path = Path(job["folder"], str(job["rank"]))
        pid = os.fork()
        if not pid:
            output = os.open(path.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(job["env"])
            return job
        children[pid] = path.with_suffix(".exit")
        os.write(1, f"{pid}\n".encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return None


def _main() -> None:
    job = {"target": sys.argv[1], "args": json.loads(sys.argv[2])} if len(sys.argv) > 1 else _serve()
    if job is None:
        return
    module, name = job["target"].split(":")
    _join_group()
    getattr(importlib.import_module(module), name)(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *job["args"])


if __name__ == "__main__":
    _main()
