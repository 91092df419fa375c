"""The processes of the job on this machine: a rank that is gone or stopped says nothing itself, but the kernel does."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.pipeline.transport.guard import STOPPED, look

_GONE = ("Z", "X", "x")  # states in /proc: a zombie has ended


class _Process(NamedTuple):
    pid: int
    started: str  # in clock ticks since the machine started: a number that is given to another process has another one


class Processes:
    """Knows the processes of the ranks on this machine, and what has become of them; where there is no /proc, of none.

    Args:
        board: on which ranks leave their process numbers.
        rank: of this process.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank = board, rank
        self._key, self._known = f"ds_terapipe/processes/{_machine()}", dict[int, _Process]()
        mine = look(os.getpid())
        if mine is not None and board.appends:
            self._board.put(self._key, f"{rank} {os.getpid()} {mine[1]}\n", append=True)

    def learn(self) -> None:
        """Read which processes there are: those of ranks that have come so far."""
        texts = self._board.read([self._key])
        for line in (texts or {}).get(self._key, "").splitlines():
            rank, pid, started = line.split()
            self._known[int(rank)] = _Process(int(pid), started)

    def lost(self) -> dict[int, str]:
        """Ranks of this machine that are gone or stopped, and which process that is."""
        found = {}
        for rank, (pid, _) in self._known.items():
            state = self._state(rank)
            if state in _GONE:
                found[rank] = f"process {pid} is gone"
            elif state == STOPPED:
                found[rank] = f"process {pid} is stopped"
        return found

    def gone(self) -> set[int]:
        """Ranks of this machine whose processes have ended."""
        return {rank for rank in self._known if self._state(rank) in _GONE}

    def _state(self, rank: int) -> str:
        pid, started = self._known[rank]
        found = look(pid)
        return found[0] if found is not None and found[1] == started else _GONE[0]


def _machine() -> str:
    """The same for those processes only whose numbers are of one kind: of one start of a machine, and one container."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return "unknown"
