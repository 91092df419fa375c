"""Processes of other ranks on this machine, as the kernel has them: running, stopped, gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from ds_terapipe.pipeline.transport import guard
from ds_terapipe.pipeline.transport import processes as processes_module
from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.pipeline.transport.processes import Processes


class Store(torch.distributed.HashStore):
    """One that every rank of a test has."""

    def clone(self) -> Store:
        return self


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """The process of rank 1."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def me(other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Processes:
    """The table of rank 0, which has learnt of both; with a parameter, rank 1 is on the machine of that name."""
    board = Board(Store())
    me = Processes(board, 0)
    assert me.lost() == {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: other.pid)
        if hasattr(request, "param"):
            patch.setattr(processes_module, "_machine", lambda: request.param)
        Processes(board, 1)
    me.learn()
    return me


def until(found: Callable[[], Any], wanted: Any) -> None:
    deadline = time.monotonic() + 20
    while found() != wanted:
        assert time.monotonic() < deadline, found()
        time.sleep(0.01)


def test_a_stopped_process_is_told_from_one_that_is_gone(me: Processes, other: subprocess.Popen[bytes]) -> None:
    assert me.lost() == {} and me.gone() == set()
    other.send_signal(signal.SIGSTOP)
    until(me.lost, {1: f"process {other.pid} is stopped"})
    assert me.gone() == set()
    other.kill()
    until(me.lost, {1: f"process {other.pid} is gone"})  # a zombie: its parent has not asked for it
    assert me.gone() == {1} and other.wait() == -signal.SIGKILL
    assert me.gone() == {1}


@pytest.mark.parametrize("me", ["another machine"], indirect=True)
def test_processes_of_another_machine_are_unknown(me: Processes, other: subprocess.Popen[bytes]) -> None:
    other.kill()
    other.wait()
    assert me.lost() == {} and me.gone() == set()


RANK = """
import os, signal, socket, subprocess
from ds_terapipe.pipeline.transport import guard
connection = socket.create_connection(("127.0.0.1", {port}))
os.set_inheritable(connection.fileno(), True)  # as those of PyTorch's backends
launch, engine = type("Watchdog", (), {{}}), type("Watchdog", (), {{}})
guard.beat(launch, 600)
guard.beat(engine, 0.5)
held = subprocess.Popen(["sleep", "600"], pass_fds=[guard._guards[os.getpid()].pipe])
guard.leave(launch)
print(held.pid, *open(f"/proc/self/task/{{os.getpid()}}/children").read().split(), flush=True)
os.kill(os.getpid(), signal.{signal})
"""


@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_stopped_process_is_killed_and_its_guard_ends_with_it(how: str) -> None:
    """Alone on its machine too, and though a process that it has begun keeps the guard's pipe open."""
    server = socket.create_server(("127.0.0.1", 0))
    program = RANK.format(signal=how, port=server.getsockname()[1])
    with server, subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        connection, _ = server.accept()
        held, *children = map(int, rank.stdout.readline().split())
        try:
            assert rank.wait(timeout=30) == -signal.SIGKILL and len(children) == 2
            connection.settimeout(60)
            assert connection.recv(1) == b"", "who is connected with the rank sees that it is gone"
            until(lambda: [pid for pid in children if pid != held and guard.look(pid)], [])
        finally:
            rank.kill()
            os.kill(held, signal.SIGKILL)
            connection.close()


@pytest.mark.parametrize(
    ("beats", "state", "killed_after"),
    [
        ([b"3.0\n", None, None, None, None], "T", 4),
        ([b"3.0\n", None, None, b"3.0\n3.0\n", None, None, None], "T", 7),
        ([b"3.0\n", *[None] * 9, b""], "t", None),
        ([None] * 9 + [b""], "T", None),
    ],
    ids=["stopped", "late", "in a debugger", "not yet begun"],
)
def test_a_guard_kills_only_a_process_that_stays_stopped(monkeypatch, beats, state, killed_after):
    """Beats as they come, None for a second without any; the kill comes with that many seconds and beats."""
    left, killed = list(beats), []

    def wait_a_second(*args):
        beat_comes = left[0] is not None
        if not beat_comes:
            left.pop(0)
        return [0] if beat_comes else [], [], []

    def kill(*args):
        killed.append(len(beats) - len(left))

    # names of the module alone: threads of other tests use os.kill, too
    system = SimpleNamespace(getppid=lambda: 7, read=lambda *args: left.pop(0), kill=kill)
    monkeypatch.setattr(guard, "os", system)
    monkeypatch.setattr(guard, "select", SimpleNamespace(select=wait_a_second))
    monkeypatch.setattr(guard, "look", lambda pid: (state, "0"))
    guard.watch(7)
    assert killed == ([] if killed_after is None else [killed_after])


def test_an_engine_may_be_collected_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchdog leaves in the middle of another one's beat."""
    monkeypatch.setattr(guard, "look", lambda pid: guard.leave(object()))
    beating = threading.Thread(target=guard.beat, args=(owner := object(), 600), daemon=True)
    beating.start()
    beating.join(20)
    assert not beating.is_alive()
    guard.leave(owner)
