"""Processes of the job on this machine: the kernel knows which ranks are gone or stopped."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.pipeline.transport.guard import STOPPED, look

_LOOKS, _BETWEEN_LOOKS_S = 5, 0.1  # time until a process with broken connections is gone
_GONE = ("Z", "X", "x")  # states in /proc: a zombie has ended


class _Process(NamedTuple):
    pid: int
    started: str  # in clock ticks since the boot; tells a reused process number


class Processes:
    """Knows the processes of the ranks on this machine, and their states; without /proc, of none.

    Args:
        board: board with the ranks' process numbers.
        rank: rank of this process.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._key, self._known = f"ds_terapipe/processes/{_machine()}", dict[int, _Process]()
        mine = look(os.getpid())
        if mine is not None and board.appends:
            self._board.put(self._key, f"{rank} {os.getpid()} {mine[1]}\n", append=True)

    def learn(self) -> None:
        """Read the processes of the ranks that have started so far."""
        texts = self._board.read([self._key])
        for line in (texts or {}).get(self._key, "").splitlines():
            rank, pid, started = line.split()
            self._known[int(rank)] = _Process(int(pid), started)

    def lost(self) -> dict[int, str]:
        """Return the ranks of this machine that are gone or stopped, each with a text about its process."""
        found = {}
        for rank, (pid, _) in self._known.items():
            state = self._state(rank)
            if state in _GONE:
                found[rank] = f"process {pid} is gone"
            elif state == STOPPED:
                found[rank] = f"process {pid} is stopped"
        return found

    def look_for_lost(self, learns: bool) -> dict[int, str]:
        """Return :meth:`lost`; look several times, as connections break before a process ends.

        Args:
            learns: whether ranks are still starting.
        """
        for _ in range(_LOOKS):
            if learns:
                self.learn()
            found = self.lost()
            if found:
                return found
            time.sleep(_BETWEEN_LOOKS_S)
        return {}

    def gone(self) -> set[int]:
        """Return the ranks of this machine whose processes have ended."""
        return {rank for rank in self._known if self._state(rank) in _GONE}

    def _state(self, rank: int) -> str:
        pid, started = self._known[rank]
        found = look(pid)
        return found[0] if found is not None and found[1] == started else _GONE[0]


def _machine() -> str:
    """Return a name for processes with comparable numbers: of one boot of a machine, and one container."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return "unknown"
