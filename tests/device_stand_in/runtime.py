"""The preloaded runtime, seen from Python: counters, memory in use, waits of the host, races."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_HERE = __name__.rpartition(".")[0]
_CALLERS = 4
_WAIT_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_EACH_RACE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
HOST = -1
"""Stream of accesses by the host, for `access`."""


class Counts(NamedTuple):
    """Calls so far in this process: kernels, waits of the host, copies to host and device, blocks from cudaMalloc."""

    launches: int
    host_waits: int
    to_host: int
    to_device: int
    allocations: int


class Wait(NamedTuple):
    """A call that made the host wait, and who made it: ``package.module:function``, innermost first, PyTorch left out."""

    call: str
    callers: tuple[str, ...]


def _library() -> Any:
    library = ctypes.CDLL(None)  # what is preloaded is in the process's own names
    if not hasattr(library, "stand_in_counts"):
        return None
    library.stand_in_reach.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.stand_in_used.restype = ctypes.c_size_t
    access = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    library.stand_in_access.argtypes = access
    for function in (library.stand_in_allocated, library.stand_in_freed, library.stand_in_saw):
        function.argtypes = [ctypes.c_void_p]
    return library


LIBRARY = _library()
"""The preloaded library, None where there is none."""


def counts() -> Counts:
    """Return the counters."""
    values = (ctypes.c_long * len(Counts._fields))()
    LIBRARY.stand_in_counts(values)
    return Counts(*values)


def used(device: int) -> int:
    """Return the bytes that PyTorch's allocator holds of a device."""
    return int(LIBRARY.stand_in_used(device))


def reach(stream: int, device: int) -> None:
    """Return when a kernel that is issued now would begin; no wait of the program's."""
    LIBRARY.stand_in_reach(stream, device)


@contextmanager
def host_waits() -> Iterator[Counter[Wait]]:
    """Context manager that counts what makes the host wait, in all threads."""
    seen: Counter[Wait] = Counter()
    hook = _WAIT_HOOK(lambda call: seen.update([Wait(call.decode(), _callers())]))
    LIBRARY.stand_in_set_wait_hook(hook)
    try:
        yield seen
    finally:
        LIBRARY.stand_in_set_wait_hook(None)


def _callers() -> tuple[str, ...]:
    names: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(names) < _CALLERS:
        module = frame.f_globals.get("__name__", "?")
        if module != "torch" and not module.startswith(("torch.", f"{_HERE}.runtime", f"{_HERE}.compute")):
            names.append(f"{module}:{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(names)


def races() -> Counter[str]:
    """Return the races found so far with STAND_IN_RACES=1, one sentence each with how often, and forget them."""
    found: Counter[str] = Counter()
    LIBRARY.stand_in_take_races(_EACH_RACE(lambda race, count: found.update({race.decode(): count})))
    return found
