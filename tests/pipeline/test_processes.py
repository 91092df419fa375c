"""Processes of other ranks on this machine, as the kernel has them: running, stopped, gone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed

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


def test_a_stopped_process_is_told_and_ended(me: Processes, other: subprocess.Popen[bytes]) -> None:
    assert me.lost() == {} and me.gone() == set()
    me.end_stopped()
    assert other.poll() is None, "only what is stopped is ended"
    other.send_signal(signal.SIGSTOP)
    until(me.lost, {1: f"process {other.pid} is stopped"})
    assert me.gone() == set()
    me.end_stopped()
    until(me.lost, {1: f"process {other.pid} is gone"})  # a zombie: its parent has not asked for it
    assert me.gone() == {1} and other.wait() == -signal.SIGKILL
    assert me.gone() == {1}


def test_another_process_of_the_same_number_is_not_the_one(
    me: Processes, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = processes_module._look
    monkeypatch.setattr(processes_module, "_look", lambda pid: (look(pid)[0], f"{look(pid)[1]}0"))  # it began later
    other.send_signal(signal.SIGSTOP)
    assert me.lost()[1] == f"process {other.pid} is gone"
    me.end_stopped()
    assert other.poll() is None


@pytest.mark.parametrize("me", ["another machine"], indirect=True)
def test_processes_of_another_machine_are_unknown(me: Processes, other: subprocess.Popen[bytes]) -> None:
    other.kill()
    other.wait()
    assert me.lost() == {} and me.gone() == set()
