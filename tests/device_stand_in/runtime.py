"""The preloaded runtime, seen from Python: its functions, races."""

import ctypes
from collections import Counter
from typing import Any

_EACH_RACE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)
HOST = -1  # stream of accesses by the host


def _library() -> Any:
    library = ctypes.CDLL(None)  # what is preloaded is in the process's own names
    if not hasattr(library, "stand_in_reach"):
        return None
    library.stand_in_reach.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.stand_in_access.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p]
    for function in (library.stand_in_allocated, library.stand_in_freed, library.stand_in_saw):
        function.argtypes = [ctypes.c_void_p]
    return library


LIBRARY = _library()  # None where none is preloaded


def races() -> Counter[str]:
    """Return the races found so far with STAND_IN_RACES=1, one sentence each with how often, and forget them."""
    found: Counter[str] = Counter()
    LIBRARY.stand_in_take_races(_EACH_RACE(lambda race, count: found.update({race.decode(): count})))
    return found
