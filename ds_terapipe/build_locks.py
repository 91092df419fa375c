"""Locks of a launch that was killed while PyTorch compiled an extension: later launches wait for them for ever.

DeepSpeed's ops are compiled by ``torch.utils.cpp_extension``, which waits in silence until a file named ``lock`` is gone, in
the folder of the extension. A process that compiles has its lock open, so a lock that no process has open is stale. FusedLamb's
op has locks that the kernel releases (``jit.py``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

STALE_AFTER_S, SAID_AFTER_S = 1.0, 20.0
REMOVE = "ds_terapipe report --remove-stale-locks"


class Lock(NamedTuple):
    """A file that stands for a compilation that is going on, or was when its process ended."""

    path: str
    age_s: float
    stale: bool


def locks() -> list[Lock]:
    """Return the locks in PyTorch's folder of extensions, the oldest first, without FusedLamb's own."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    found = []
    for path in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        if path.parent.name.startswith("ds_terapipe_"):
            continue
        with suppress(OSError):  # gone by now
            found.append(Lock(str(path), max(time.time() - path.stat().st_mtime, 0.0), is_stale(str(path))))
    return sorted(found, key=lambda lock: -lock.age_s)


def remove_stale() -> list[Lock]:
    """Remove stale locks, and return them."""
    removed = []
    for lock in locks():
        if lock.stale:
            with suppress(OSError):
                os.remove(lock.path)
                removed.append(lock)
    return removed


def is_stale(path: str) -> bool:
    """Whether no process of this machine has a lock of this user's open; False where there is no /proc."""
    if not os.path.isdir("/proc/self/fd") or os.stat(path).st_uid != os.getuid():
        return False
    real = os.path.realpath(path)
    for process in (name for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):  # another user's, or it has ended
            for file in os.scandir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    if os.readlink(file.path) == real:
                        return False
    return True


@contextmanager
def waits_are_said() -> Iterator[None]:
    """Context manager that reports waits for such a file: at once if it is stale, else after `SAID_AFTER_S`."""
    original = say_waits()
    try:
        yield
    finally:
        _baton().wait = original


def say_waits() -> object:
    """Make such waits report themselves from now on; return the method that was in place."""
    original = _baton().wait
    if hasattr(original, "ds_terapipe_says"):
        return original

    def wait(self: object) -> None:
        path = str(self.lock_file_path)  # type: ignore[attr-defined]
        said = (STALE_AFTER_S, True), (SAID_AFTER_S, False)
        timers = [threading.Timer(after, _say, [path, stale]) for after, stale in said]
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            original(self)
        finally:
            for timer in timers:
                timer.cancel()

    wait.ds_terapipe_says = True  # type: ignore[attr-defined]
    _baton().wait = wait
    return original


def _baton() -> Any:
    from torch.utils.file_baton import FileBaton

    return FileBaton


_STALE = (
    "waiting for %s, which no process of this machine holds: a launch was killed while it compiled an extension; remove it with "
    f"{REMOVE}"
)
_HELD = (
    "waiting for %s, which another process holds while it compiles an extension; if none does on any machine, remove this "
    "file"
)


def _say(path: str, stale: bool) -> None:
    """Log the wait for a lock if it is stale, or not, as asked."""
    with suppress(OSError):
        if is_stale(path) is stale:
            logger.warning(_STALE if stale else _HELD, path)
