"""Run one function in several gloo processes on this machine and collect what each rank returned or raised.

:func:`run_ranks` and :func:`launched` are for functions that come to an end. :func:`run_to_exit` and
:func:`run_script` are for processes that end by themselves: what counts is when, and what they wrote.

A process is forked by a server that has imported what it uses, which takes seconds. Nothing outlives a call.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import itertools
import json
import multiprocessing.spawn
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
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import device
from tests.pool import ROOM, Launch

Function, Environment = Callable[..., Any], Mapping[str, str] | None
_HERE = os.getcwd()  # servers stay there, wherever a test goes
LEAVES_AFTER_S = 5.0
_ALONE = 4.0  # load of a core, of a run of these tests alone
# Modules that each server imports, in 5 to 10 s, if they are installed. The first optimiser imports torch._dynamo, the first
# engine with ZeRO muon_optimizer, which compiles a function.
_ENGINES = ("torch", "torch._dynamo", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
_MODELS = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gemma2", "gpt2"))  # all models need these
SERVERS = {
    "ranks": (*_ENGINES, *_MODELS, "hypothesis", "ds_terapipe.elastic.engine", "tests.pipeline.training", "megatron.core",
              "ds_terapipe.megatron.layers", "ds_terapipe.hf", "tests.rows.train"),
    "scripts": _ENGINES,
}  # fmt: skip
_ASKING = {name: threading.Lock() for name in SERVERS}


@dataclass(frozen=True)
class Exit:
    rank: int
    code: int | None  # negative for a signal; None for one that was still there and had to be killed
    output: str  # stdout and stderr
    at: float  # ``time.monotonic()`` when it was gone

    def mark(self, name: str) -> float:
        """The time at which the process called :func:`mark` with this name."""
        found = re.search(rf"^MARK {re.escape(name)} (\S+)$", self.output, re.M)
        assert found, f"rank {self.rank} never came to {name!r}:\n{self.output}"
        return float(found[1])


def mark(name: str) -> None:
    """For workers: write down that it is now; see :meth:`Exit.mark`."""
    print(f"MARK {name} {time.monotonic():.3f}", flush=True)


_PORTS = itertools.count(random.SystemRandom().randrange(17000))  # hypothesis seeds the module's own


def free_port() -> int:
    """A TCP port that was free a moment ago, and that no other launch of this process gets before it is used.

    Not one of those that the system gives to connections (32768 and up): another test's would take it before it is used.
    """
    while True:
        port = 15000 + next(_PORTS) % 17000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def is_over(begin: float, seconds: float) -> bool:
    """Whether so many seconds of a machine that runs these tests alone have passed: more where other work is on it, too."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    return time.monotonic() - begin > seconds * max(1.0, busy / _ALONE)


def run_ranks(function: Function, world_size: int, *args: Any, timeout: float = 120.0, **options: Any) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` new processes with a process group set up.

    Returns what each rank returned. Raises ``AssertionError`` with the tracebacks of those that failed, and ``TimeoutError``
    (after killing every process) when a rank neither reported nor died within ``timeout`` seconds, see :func:`is_over`.
    """
    with ROOM.of(world_size):
        return values_of(function, world_size, *args, timeout=timeout, **options)


def values_of(function: Function, world_size: int, *args: Any, timeout: float = 120.0, env: Environment = None) -> list[Any]:
    """Do as :func:`run_ranks`, for a caller that has room for the ranks: the run of a :class:`tests.pool.Launch`."""
    values, failed = dict[int, Any](), ""
    with _running(functools.partial(_report, function, args), world_size, env=env) as folder:
        begin = time.monotonic()
        while missing := set(range(world_size)) - values.keys():
            for rank in missing:
                gone, path, error = (folder / f"{rank}.exit").exists(), folder / f"{rank}.result", ""
                if path.exists():
                    values[rank], error = pickle.loads(path.read_bytes())
                elif gone:
                    end = _exit_of(rank, folder)
                    values[rank], error = None, f"died without a word with {end.code}\n{end.output[-3000:]}"
                failed += error and f"rank {rank}: {error}\n"
            if is_over(begin, timeout):
                raise TimeoutError(f"ranks {sorted(missing)} did not report within {timeout} s\n{failed}")
            time.sleep(0.02)
    assert not failed, failed
    return [values[rank] for rank in range(world_size)]


def launched(function: Any, world_size: int, *args: Any, timeout: float = 120.0, folder: bool = False, **options: Any) -> Any:
    """A fixture of a module: what :func:`run_ranks` returns. The launch begins when collection is over (``tests/pool.py``).

    Of several functions each rank returns a list of results. The timeout counts from the launch's own beginning. With ``folder``
    the functions get an empty folder as one more argument, which is gone when the launch is over.
    """
    first, work = (function, function) if callable(function) else (function[0], functools.partial(_each, function))

    def run() -> list[Any]:
        with tempfile.TemporaryDirectory() if folder else contextlib.nullcontext() as path:
            given = (*args, path) if folder else args
            return values_of(work, world_size, *given, timeout=timeout, **options)

    return in_background(f"{first.__module__}:{first.__name__}", world_size, run)


def _each(functions: Sequence[Function], *args: Any) -> list[Any]:
    return [function(*args) for function in functions]


def in_background(name: str, ranks: int, run: Callable[[], Any]) -> Any:
    """A fixture of a module: what ``run()`` returns, which begins when collection is over and there is room for the ranks."""
    launch = Launch(name, ranks, run)

    def results() -> Any:
        return launch.results()

    results.launch = launch  # type: ignore[attr-defined]  # for conftest.py
    return pytest.fixture(scope="module")(results)


def run_to_exit(function: Function, world_size: int, *args: Any, timeout: float = 60.0, env: Environment = None) -> list[Exit]:
    """Call ``function(rank, world_size, *args)`` in processes that end as scripts do: uncaught errors, then Python's own exit.

    After ``timeout`` seconds every process that hangs is killed, with None as exit code. May be called from several threads.
    """
    return _until_exit(functools.partial(_call, function, args), world_size, timeout, env=env)


def run_script(text: str, folder: Path, *argv: str, env: Environment = None) -> Exit:
    """Run a script as ``python train.py *argv`` does in a folder, with torch and deepspeed imported but none of our modules.

    ``torch._import_device_backends()`` does there what the end of ``import torch`` does: PyTorch's switch for it is off.
    """
    work = functools.partial(_run_script, text, str(folder), argv)
    return _until_exit(work, 1, 240.0, server="scripts", env=env)[0]


def _until_exit(work: Callable[[], Any], world_size: int, timeout: float, **options: Any) -> list[Exit]:
    with _running(work, world_size, **options) as folder:
        begin = time.monotonic()
        waited_for = [folder / f"{rank}.exit" for rank in range(world_size)]
        while not is_over(begin, timeout) and not all(path.exists() for path in waited_for):
            time.sleep(0.02)
        late = {rank for rank, path in enumerate(waited_for) if not path.exists()}
        _end(folder)
        return [_exit_of(rank, folder, killed=rank in late) for rank in range(world_size)]


def torchrun(function: Function, world_size: int, *args: Any, until: str, timeout: float = 240.0) -> Exit:
    """:func:`run_to_exit` by torchrun on fresh interpreters: all output together, and the exit code of the launcher.

    A worker may stop the launcher (``SIGSTOP``) before it dies: it goes on when the output matches ``until``, and does not end
    the others before they have said a word.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}"]
    with tempfile.TemporaryDirectory() as folder:
        _write_job(folder, functools.partial(_call, function, args))
        command += [f"--master-port={free_port()}", "-m", "tests.spawn", folder]
        output = Path(folder, "out")
        with output.open("wb") as file:
            launcher = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=_environment())
        seen, begin = {launcher}, time.monotonic()
        while launcher.poll() is None and not is_over(begin, timeout):
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.update(launcher.children(recursive=True))
                stopped = launcher.status() == psutil.STATUS_STOPPED
                if stopped and re.search(until, output.read_text(errors="replace")):
                    launcher.resume()
            time.sleep(0.02)
        code, at = launcher.poll(), time.monotonic()
        left = [process for process in seen if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        launcher.wait()
        assert not left, f"still there: {left}"
        return Exit(-1, code, output.read_text(errors="replace"), at)


@contextlib.contextmanager
def _running(work: Callable[[], Any], world_size: int, server: str = "ranks", env: Environment = None) -> Iterator[Path]:
    """Processes that call ``work``; yields the folder with each one's output (RANK.out) and how it ended (RANK.exit).

    Those of a GPU test have other settings than the server, and get interpreters of their own.
    """
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    settings |= {"LOCAL_SIZE": str(world_size), **(env or {})}
    fresh = settings.get("DS_ACCELERATOR", device.NAME) != device.NAME
    with tempfile.TemporaryDirectory() as path:
        _write_job(path, work)
        try:
            for rank in range(world_size):
                ranked = {**settings, "RANK": str(rank), "LOCAL_RANK": str(device.local_rank(rank))}
                pid = _fork(server, {"folder": path, "rank": rank, "env": ranked, "fresh": fresh})
                Path(path, f"{rank}.pid").write_text(str(pid))
            yield Path(path)
        finally:
            _end(Path(path))


def _write_job(folder: str, work: Callable[[], Any]) -> None:
    """Functions of a program that was started by its name, ``python -m tests.benchmarks...``, are found there."""
    main = getattr(sys.modules["__main__"].__spec__, "name", None)
    Path(folder, "job").write_bytes(pickle.dumps((main, pickle.dumps(work))))


def _end(folder: Path) -> None:
    """Kill what is left of a job's processes, and wait until they are gone."""
    for path in folder.glob("*.pid"):
        if not path.with_suffix(".exit").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
    while not all(path.with_suffix(".exit").exists() for path in folder.glob("*.pid")):
        ended = [name for name, server in _servers.items() if server.poll() is not None]
        assert not ended, f"the servers of {ended} have ended, see stderr"
        time.sleep(0.02)


def _exit_of(rank: int, folder: Path, killed: bool = False) -> Exit:
    code, at = json.loads((folder / f"{rank}.exit").read_text())
    return Exit(rank, None if killed else code, (folder / f"{rank}.out").read_text(errors="replace"), at)


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    settings = {"DS_ACCELERATOR": device.NAME, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    return {**os.environ, **settings}


_servers: dict[str, subprocess.Popen[str]] = {}


@functools.cache
def server(name: str) -> subprocess.Popen[str]:
    env = _environment() | ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if name == "scripts" else {})
    command = [sys.executable, "-m", "tests.spawn", "--serve", name]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=_HERE)
    atexit.register(server.communicate)  # closes its input, which ends it
    _servers[name] = server
    return server


def _fork(name: str, job: Mapping[str, Any]) -> int:
    """Have a server fork a process for a job; its id."""
    with _ASKING[name]:
        forks = server(name)
        forks.stdin.write(json.dumps(job) + "\n")
        forks.stdin.flush()
        answer = forks.stdout.readline()
        assert answer, f"the server of {name} has ended with {forks.wait()}"
        return int(answer)


def _serve(name: str) -> Path | None:
    """Fork a child for every job. Returns the job's folder in the child, and None in the server when there will be no more."""
    with device.untouched():
        for module in SERVERS[name]:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is imported stays: the end of each process would go through it, for two seconds
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
            if job["fresh"]:
                os.execv(sys.executable, [sys.executable, "-m", "tests.spawn", job["folder"]])
            return Path(job["folder"])
        children[pid] = path.with_suffix(".exit")
        os.write(1, f"{pid}\n".encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    return None


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
            with contextlib.suppress(FileNotFoundError):  # a launch that failed while it began has taken its folder away
                _put(children.pop(pid), json.dumps([os.waitstatus_to_exitcode(status), time.monotonic()]).encode())


def _put(path: Path, data: bytes) -> None:
    """Write a file that is whole as soon as it is there."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.rename(path)


def _share_gloo_thread() -> None:
    """Let all groups of gloo have one thread that looks after their messages: each group's own wakes up 100 times a second."""
    from torch.distributed import ProcessGroupGloo as Gloo

    interface = os.environ.get("GLOO_SOCKET_IFNAME")  # of a host in tests/benchmarks/two_hosts.py
    init, shared = Gloo.__init__, Gloo.create_device(interface=interface) if interface else Gloo.create_default_device()

    def with_shared(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = Gloo._Options()
        options._devices, options._timeout = [shared], timeout
        init(group, store, rank, size, options)

    Gloo.__init__ = with_shared


def _join_group() -> tuple[int, int]:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays; BF16_Optimizer collects garbage four times, a quarter of a second each, else
    # DeepSpeed's shared-memory all-reduce is compiled at first use, under a lock that a killed test would leave behind
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.NAME == "cpu":
        _share_gloo_thread()
        for module in (torch.cuda, torch.xpu, torch.mtia):  # each seed waits there with a stack trace for a device
            module._lazy_call = lambda call, **options: None
    deepspeed.init_distributed(device.take(), timeout=timedelta(seconds=120), auto_mpi_discovery=False, verbose=False)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _call(function: Function, args: tuple[Any, ...]) -> None:
    function(*_join_group(), *args)


def _report(function: Function, args: tuple[Any, ...]) -> None:
    server, error = os.getppid(), ""
    try:
        sent = pickle.dumps((function(*_join_group(), *args), error))
    except BaseException:
        error = traceback.format_exc()
        sent = pickle.dumps((None, error))
    _put(Path(os.environ["TESTS_SPAWN_FOLDER"], f"{os.environ['RANK']}.result"), sent)
    # Rank 0 keeps the store that the others may still be making groups with: a rank stays until `values_of` has heard from all
    # of them and ends it. One that failed leaves after a while, so that those who wait for it get to know.
    until = time.monotonic() + LEAVES_AFTER_S if error else float("inf")
    while os.getppid() == server and time.monotonic() < until:
        time.sleep(0.1)
    # Other ranks may already be gone: the orderly shutdown of the process group would wait for them.
    os._exit(0)


def _run_script(text: str, folder: str, argv: Sequence[str]) -> None:
    os.chdir(folder)
    sys.argv = ["train.py", *argv]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(text, "train.py", "exec"), main.__dict__)


def _main() -> None:
    folder = _serve(sys.argv[2]) if sys.argv[1] == "--serve" else Path(sys.argv[1])
    if folder is not None:
        os.environ["TESTS_SPAWN_FOLDER"] = str(folder)
        main, work = pickle.loads((folder / "job").read_bytes())
        if main is not None:
            multiprocessing.spawn._fixup_main_from_name(main)
        pickle.loads(work)()


if __name__ == "__main__":
    importlib.import_module("tests.spawn")._main()  # not this module's: what is pickled belongs to that one
