"""How figures are taken on a machine whose two cores slow each other by up to 2x from minute to minute.

A round measures every column once, one after another. Before and after it a fixed computation runs alone in one
worker and then in two at once. A round during which two ran more than 1.15x slower than one is dropped; none is begun
before they did not, unless that takes longer than ``PATIENCE`` probes. A column's figure is its minimum over the rounds
that are left, and with fewer than three of those nothing is concluded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tests.benchmarks.workers import Seat, Workers

SLOWDOWN_LIMIT = 1.15
CLEAN_ROUNDS_NEEDED = 3
PATIENCE = 30


@dataclass(frozen=True)
class Probe:
    """Seconds of the fixed computation in each of two workers: alone, and both at once."""

    alone: tuple[float, ...]
    together: tuple[float, ...]

    @property
    def clean(self) -> bool:
        return max(self.together) <= SLOWDOWN_LIMIT * min(self.alone)


@dataclass(frozen=True)
class Round:
    """One pass over all columns: seconds per step of each, and the probes around it."""

    before: Probe
    after: Probe
    seconds: dict[str, float]

    @property
    def slowdown(self) -> float:
        """How many times longer two at once took than one alone, at worst."""
        return max(self.before.together + self.after.together) / min(self.before.alone + self.after.alone)

    @property
    def contention(self) -> float:
        """How many times longer two at once took than one alone, on average over the ranks, in the better probe."""
        return min(statistics.mean(one.together) / statistics.mean(one.alone) for one in (self.before, self.after))

    @property
    def clean(self) -> bool:
        return self.slowdown <= SLOWDOWN_LIMIT


@dataclass(frozen=True)
class Minima:
    """Minimum of each column over the clean rounds; over all of them when there was no clean one.

    ``slowdown`` is the median of these rounds; ``contention`` their minimum, which belongs to minimal seconds.
    """

    seconds: dict[str, float]
    clean: int
    tried: int
    slowdown: float
    contention: float
    rounds: list[Round] = field(repr=False)

    @property
    def conclusive(self) -> bool:
        return self.clean >= CLEAN_ROUNDS_NEEDED


def fixed_computation(seat: Seat, repeats: int) -> float:
    """Request: seconds for ``repeats`` passes of an MLP of 512 x 2048 over 1024 tokens, a mix like that of a GPT."""
    generator = torch.Generator().manual_seed(seat.rank)
    hidden, up, down = (torch.randn(shape, generator=generator) for shape in ((1024, 512), (512, 2048), (2048, 512)))
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(F.gelu(torch.mm(hidden, up)), down)
    return time.perf_counter() - start


def probe(workers: Workers, repeats: int = 16) -> Probe:
    """Run the fixed computation in workers 0 and 1: first each alone, then both at once."""
    alone = tuple(workers.call(fixed_computation, repeats, ranks=[rank])[0] for rank in (0, 1))
    return Probe(alone, tuple(workers.call(fixed_computation, repeats, ranks=[0, 1])))


def run_rounds(
    columns: Mapping[str, Callable[[], float]],
    take_probe: Callable[[], Probe],
    wanted: int,
    at_most: int,
    report: Callable[[str], None] = lambda line: None,
    patience: int = PATIENCE,
) -> list[Round]:
    """Rounds over ``columns`` (name -> measurement, in seconds) until ``wanted`` are clean or ``at_most`` were tried.

    Before a round at most ``patience`` probes wait for a quiet machine. The order of the columns is reversed every other
    round, so none always follows the same neighbour.
    """
    rounds: list[Round] = []
    while len(rounds) < at_most and sum(one.clean for one in rounds) < wanted:
        names = list(columns) if len(rounds) % 2 == 0 else list(reversed(columns))
        before = take_probe()
        for _ in range(patience):
            if before.clean:
                break
            before = take_probe()
        seconds = {name: columns[name]() for name in names}
        rounds.append(Round(before, take_probe(), {name: seconds[name] for name in columns}))
        state = "clean" if rounds[-1].clean else "dropped"
        report(f"round {len(rounds)}: two at once {rounds[-1].slowdown:.2f}x slower than one, {state}")
    return rounds


def minima(rounds: Sequence[Round]) -> Minima:
    """Each column's minimum. Raises ValueError without rounds."""
    if not rounds:
        raise ValueError("no rounds were run")
    clean = [one for one in rounds if one.clean]
    used = clean or list(rounds)
    seconds = {name: min(one.seconds[name] for one in used) for name in used[0].seconds}
    slowdown = statistics.median(one.slowdown for one in used)
    contention = min(one.contention for one in used)
    return Minima(seconds, len(clean), len(rounds), slowdown, contention, list(rounds))


def verdict(ratio: float, target: float, noise: float, conclusive: bool) -> str:
    """``pass``, ``miss`` or ``inconclusive``; a miss by no more than the relative ``noise`` is inconclusive."""
    if not conclusive:
        return "inconclusive"
    if ratio >= target:
        return "pass"
    return "inconclusive" if ratio * (1 + noise) >= target else "miss"
