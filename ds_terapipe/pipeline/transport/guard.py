"""A small process beside a rank that kills the rank when it stays stopped (SIGSTOP).

A stopped process ignores a launcher's SIGTERM, and there may be no other rank on its machine. The rank writes to its
guard about once a second. After a given time of silence the guard kills it, if the kernel reports it as stopped; a
process held by a debugger is left alone. The guard ends with the rank. It counts its own seconds, so a job that is
suspended as a whole can continue.

This file is also the guard's program, so it only imports the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

STOPPED = "T"  # by a signal; under a debugger it is "t"
_TICK_S = 1.0


class _Guard(NamedTuple):
    pid: int
    pipe: int  # to its standard input


_guards: dict[int, _Guard] = {}  # by process: a fork has none at first
_limits_s: dict[int, float] = {}  # by owner
_lock = threading.RLock()  # an engine that is collected, at any time, leaves


def _forked() -> None:
    _limits_s.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forked)


def beat(owner: Any, limit_s: float) -> None:
    """Tell the guard that this process runs; the first call starts the guard.

    Args:
        owner: object that needs the guard; others may have longer limits.
        limit_s: seconds of silence after which a stopped process is killed.
    """
    with _lock, suppress(OSError):  # the guard has ended, or cannot be started
        _limits_s[id(owner)] = limit_s
        if os.getpid() not in _guards and look(os.getpid()) is not None:
            _guards[os.getpid()] = _start()
        _say_limit()


def leave(owner: Any) -> None:
    """End the guard if no other owner needs it."""
    with _lock, suppress(OSError):
        _limits_s.pop(id(owner), None)
        if _limits_s:
            return _say_limit()
        guard = _guards.pop(os.getpid(), None)
        if guard is not None:
            os.close(guard.pipe)
            os.kill(guard.pid, signal.SIGKILL)  # at once: a forked process may keep the pipe open
            os.waitpid(guard.pid, 0)


def _say_limit() -> None:
    text = f"{max(_limits_s.values(), default=0)}\n".encode()
    guard = _guards.get(os.getpid())
    if guard is not None:
        os.write(guard.pipe, text)


def _start() -> _Guard:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    program = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]
    actions = [(os.POSIX_SPAWN_DUP2, reading, 0), *quiet]
    try:
        return _Guard(os.posix_spawn(program[0], program, os.environ, file_actions=actions), writing)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)


def watch(pid: int) -> None:
    """Read the beats of the parent process ``pid`` on standard input until its end."""
    limit_s, silent_s = 0.0, 0.0
    while os.getppid() == pid:  # a forked process may keep the pipe open
        if select.select([0], [], [], _TICK_S)[0]:
            beats = os.read(0, 1 << 16).split()
            if not beats:
                return
            limit_s, silent_s = float(beats[-1]), 0.0
        else:
            silent_s += _TICK_S
            state = look(pid)
            if 0 < limit_s <= silent_s and state is not None and state[0] == STOPPED:
                os.kill(pid, signal.SIGKILL)
                return


def look(pid: int) -> tuple[str, str] | None:
    """Return state and start time of a process from the kernel; None: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


if __name__ == "__main__":
    os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))  # connections that would outlive the rank
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # leaves these signals to the rank
        signal.signal(ignored, signal.SIG_IGN)
    watch(int(sys.argv[1]))
