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
from tests.mutants import applied
from tests.mutants.claims import holds


class Store(torch.distributed.HashStore):
    """One that every rank of a test has."""

    def clone(self) -> Store:
        return self


@pytest.fixture
def board() -> Board:
    return Board(Store())


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            yield process
        finally:
            process.kill()


def as_rank(monkeypatch: pytest.MonkeyPatch, board: Board, rank: int, pid: int) -> Processes:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        return Processes(board, rank)


def until(found: Callable[[], Any], wanted: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while found() != wanted:
        assert time.monotonic() < deadline, found()
        time.sleep(0.01)


def test_a_stopped_process_is_told_and_ended(board, other, monkeypatch):
    me = Processes(board, 0)
    as_rank(monkeypatch, board, 1, other.pid)
    assert me.lost() == {}
    me.learn()
    assert me.lost() == {} and me.gone() == set()
    me.end_stopped()
    assert other.poll() is None, "only what is stopped is ended"
    other.send_signal(signal.SIGSTOP)
    until(me.lost, {1: f"process {other.pid} is stopped"})
    assert me.gone() == set()
    check_end(me, other)


def check_end(me: Processes, other: subprocess.Popen[bytes], within_s: float = 60.0) -> None:
    me.end_stopped()
    until(me.lost, {1: f"process {other.pid} is gone"}, within_s)  # a zombie: its parent has not asked for it
    assert me.gone() == {1} and other.wait() == -signal.SIGKILL
    assert me.gone() == {1}


# for tests.mutants
def stopped_is_ended(mutant: str | None) -> bool:
    board = Board(Store())
    me = Processes(board, 0)
    with subprocess.Popen(["sleep", "600"]) as other, pytest.MonkeyPatch.context() as patch, applied(mutant):
        as_rank(patch, board, 1, other.pid)
        me.learn()
        other.send_signal(signal.SIGSTOP)
        until(me.lost, {1: f"process {other.pid} is stopped"})
        try:
            return holds(check_end, me, other, 5.0)
        finally:
            other.kill()


def test_another_process_of_the_same_number_is_not_the_one(board, other, monkeypatch):
    me = Processes(board, 0)
    as_rank(monkeypatch, board, 1, other.pid)
    me.learn()
    pid, started = me._known[1]
    me._known[1] = processes_module._Process(pid, started + "0")
    other.send_signal(signal.SIGSTOP)
    assert me.lost() == {1: f"process {pid} is gone"}
    me.end_stopped()
    assert other.poll() is None


def test_processes_of_another_machine_are_unknown(board, other, monkeypatch):
    me = Processes(board, 0)
    monkeypatch.setattr(processes_module, "_machine", lambda: "another")
    as_rank(monkeypatch, board, 1, other.pid)
    me.learn()
    assert set(me._known) == {0}
