"""Processes of other ranks on this machine, as the kernel has them: running, stopped, gone."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed

from ds_terapipe.pipeline.transport import board as board_module, guard, processes as processes_module
from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.pipeline.transport.processes import Processes
from tests.spawn import mark, run_to_exit


class Store(torch.distributed.HashStore):
    """One that every rank of a test has."""

    def clone(self) -> Store:
        return self


def test_a_store_whose_host_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "_CONNECTED_WITHIN_S", 0.2)
    came = threading.Event()
    for clone, silent_s in ((lambda: came.wait(30) and Store(), 0.2), (partial(os.listdir, "/none"), math.inf)):
        board = Board(SimpleNamespace(clone=clone, has_extended_api=lambda: True))
        board.put("key", "text")
        assert board.read(["key"]) is None and silent_s <= board.silent_s() and (board.silent_s() < 30) == (silent_s < 30)
    came.set()


class Late(Store):
    """One that answers after three seconds."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(3)
        mark("answered")
        return False


def leave_while_it_is_asked(*_: int) -> None:
    board_module._READ_WITHIN_S = 0.1
    assert Board(Late()).read(["key"]) is None
    mark("left")


def test_a_process_ends_after_a_store_that_is_late_has_answered() -> None:
    """A thread that comes back from the store during Python's exit would abort the process."""
    (end,) = run_to_exit(leave_while_it_is_asked, 1)
    assert end.code == 0 and end.mark("left") < end.mark("answered") < end.at


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
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
    deadline = time.monotonic() + 60
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


@pytest.mark.parametrize(("beats", "state", "killed_after"), [
    ([b"3.0\n", None, None, None, None], "T", 4), ([b"3.0\n", None, None, b"3.0\n3.0\n", None, None, None], "T", 7),
    ([b"3.0\n", *[None] * 9, b""], "t", None), ([None] * 9 + [b""], "T", None),
], ids=["stopped", "late", "in a debugger", "not yet begun"])  # fmt: skip
def test_a_guard_kills_only_a_process_that_stays_stopped(monkeypatch, beats, state, killed_after):
    """Beats as they come, None for a second without any; the kill comes with that many seconds and beats."""
    left, killed = list(beats), []

    def wait_a_second(*args):
        beat_comes = left[0] is not None
        if not beat_comes:
            left.pop(0)
        return [0] if beat_comes else [], [], []

    # names of the module alone: threads of other tests use os.kill, too
    system = SimpleNamespace(getppid=lambda: 7, read=lambda *args: left.pop(0))
    system.kill = lambda *args: killed.append(len(beats) - len(left))
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
