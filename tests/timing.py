"""How long a run of tests takes: its slowest rows, and a limit that depends on the machine."""

import time
from collections.abc import Iterable

QUIET_S = 0.0045  # that `probe` takes on the machine of which the limit is said
MOST_SLOWER = 20 / 12  # of a limit, on a machine that is slower


def probe() -> float:
    """Seconds of a short loop, the least of many: other work does not hit all of them."""
    found = []
    for _ in range(30):
        begin, total = time.perf_counter(), 0
        for number in range(100_000):
            total += number * number
        found.append(time.perf_counter() - begin)
    return min(found)


def limit_here(minutes: float, seconds: float) -> float:
    """The limit in minutes on a machine on which `probe` takes so many seconds."""
    return minutes * min(max(seconds / QUIET_S, 1.0), MOST_SLOWER)


def slowest(named: Iterable[tuple[str, float]], number: int) -> list[str]:
    """Lines of the rows that took longest."""
    ordered = sorted(named, key=lambda each: -each[1])[:number]
    return [f"{seconds:7.1f} s  {name}" for name, seconds in ordered]
