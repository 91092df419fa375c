"""Rounds, probes and columns: how every benchmark of speed takes its figures.

Two cores of one machine slow each other by up to 2x from minute to minute. A round measures every column once, one after
another. Before and after it a probe runs a fixed computation on one rank and then on two at once. A round is dropped where two
took over 1.15 times what one takes; none begins before a probe is below that, as far as patience goes. A column's figure is its
minimum over the rounds that are left. With fewer than three of those the figures are inconclusive.

What is measured runs in two processes of one thread, on both ranks alike (:func:`on_ranks`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.spawn import run_ranks

SLOWDOWN_LIMIT, CLEAN_ROUNDS, LOSS_TOLERANCE = 1.15, 3, 1e-4
LONGEST_S = 7 * 24 * 3600.0
# Peers run without our hook in DeepSpeed. In every column glibc keeps what a step frees for the next one: by itself it gives
# large blocks back, and zeroes thousands of pages in every step.
ENVIRONMENT = {
    "DS_TERAPIPE_AUTOLOAD": "0",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # bytes of a block; the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),  # bytes free at the end of the heap, before any is given back
}


class WrongResult(AssertionError):
    """A column trained something else than the others: its time means nothing."""


# ------------------------------------------------------------------------------------------------------------------ ranks


def on_ranks(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function(*arguments)`` on two ranks; return the first one's result. Raises AssertionError where one fails."""
    return run_ranks(_on_rank, 2, function, *arguments, timeout=LONGEST_S, env=ENVIRONMENT)[0]


def _on_rank(rank: int, world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # DeepSpeed's log
    return function(*arguments)


def say(line: str) -> None:
    """Progress, of the first rank, goes to stderr, results to stdout."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def slowest(seconds: Sequence[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def timed(step: Callable[[], object], steps: int) -> list[float]:
    """Seconds of so many steps, each begun together on all ranks and as long as on the slowest one."""
    taken = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return slowest(taken)


def fixed_computation(repeats: int) -> float:
    """Seconds for ``repeats`` passes of an MLP of 512 x 2048 over 1024 tokens, a mix like that of a GPT."""
    generator = torch.Generator().manual_seed(0)
    hidden, up, down = (torch.randn(shape, generator=generator) for shape in ((1024, 512), (512, 2048), (2048, 512)))
    start = time.perf_counter()
    for _ in range(repeats):
        torch.mm(F.gelu(torch.mm(hidden, up)), down)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------ rounds and probes


class Probe(NamedTuple):
    """Seconds of the fixed computation: of the faster rank alone, and of the slower one when both run at once."""

    alone: float
    together: float

    @property
    def slowdown(self) -> float:
        return self.together / self.alone


def probe(repeats: int) -> Probe:
    """The fixed computation on two ranks: on each alone, then on both at once."""
    mine = [0.0, 0.0, 0.0]
    for turn in range(3):
        dist.barrier()
        if turn in (dist.get_rank(), 2):
            mine[turn] = fixed_computation(repeats)
    *alone, together = slowest(mine)
    return Probe(min(alone), together)


class Round(NamedTuple):
    """Seconds of every column, and the probes around them."""

    before: Probe
    after: Probe
    seconds: dict[str, float]

    @property
    def slowdown(self) -> float:
        """How many times longer two at once took than one alone, at worst."""
        return max(self.before.together, self.after.together) / min(self.before.alone, self.after.alone)

    @property
    def clean(self) -> bool:
        return self.slowdown <= SLOWDOWN_LIMIT


def clean_of(rounds: Sequence[Round]) -> Sequence[Round]:
    """Those that count: the clean ones, or all where none is."""
    return [one for one in rounds if one.clean] or rounds


class Result(NamedTuple):
    """Minima of the columns over the rounds that count."""

    seconds: dict[str, float]
    rounds: Sequence[Round]

    @property
    def state(self) -> str:
        """How many rounds were clean, and whether these are enough."""
        clean = sum(one.clean for one in self.rounds)
        slowdown = statistics.median(one.slowdown for one in clean_of(self.rounds))
        few = "" if clean >= CLEAN_ROUNDS else f"INCONCLUSIVE, fewer than {CLEAN_ROUNDS} clean: "
        return f"{few}{clean} clean rounds of {len(self.rounds)}, two at once {slowdown:.2f}x slower than one"

    def table(self, title: str, reference: str) -> list[str]:
        """A line for each column, with the ratios to one of them."""
        heads = f"{'':38}{'seconds':>13}{'x its time':>12}{'x its speed':>13}   it: {reference}"
        lines = [f"{title}: {self.state}", heads]
        base = self.seconds.get(reference, math.nan)
        for name, seconds in self.seconds.items():
            lines.append(f"{name:38}{seconds:13.4g}{seconds / base:12.2f}{base / seconds:13.2f}")
        return lines


@dataclass(frozen=True)
class Settings:
    """So many clean rounds are wanted and so many tried at most; ``patience`` probes wait for a quiet machine before each, of
    ``repeats`` fixed computations."""

    rounds: int = 5
    attempts: int = 15
    patience: int = 30
    repeats: int = 16

    def probe(self) -> Probe:
        return probe(self.repeats)

    def quiet(self, take_probe: Callable[[], Probe]) -> Probe:
        """The first probe of a quiet machine, or the one at which patience ends."""
        found, left = take_probe(), self.patience
        while found.slowdown > SLOWDOWN_LIMIT and left:
            found, left = take_probe(), left - 1
        return found


def run_rounds(
    columns: Mapping[str, Callable[[], float]], settings: Settings, take_probe: Callable[[], Probe] | None = None
) -> Result:
    """Rounds over ``columns`` (name and what measures its seconds) until enough are clean or the attempts end.

    The order is reversed every other round, so that no column always follows the same neighbour.
    """
    take_probe, rounds = take_probe or settings.probe, []
    while len(rounds) < settings.attempts and sum(one.clean for one in rounds) < settings.rounds:
        before = settings.quiet(take_probe)
        seconds = {name: columns[name]() for name in list(columns)[:: -1 if len(rounds) % 2 else 1]}
        rounds.append(Round(before, take_probe(), seconds))
        state = "clean" if rounds[-1].clean else "dropped"
        say(f"round {len(rounds)}: two at once {rounds[-1].slowdown:.2f}x slower than one, {state}")
    return Result({name: min(one.seconds[name] for one in clean_of(rounds)) for name in columns}, rounds)


# ---------------------------------------------------------------------------------------------------------------- columns


@dataclass(frozen=True)
class Column:
    """A way to train. ``prepare()`` returns a step: a callable that trains once and returns the loss, on one rank at least.

    Attributes:
        settling: steps that it takes until it is as fast as it will be.
        trains: columns that train the same have the same losses.
    """

    name: str
    prepare: Callable[[], Callable[[], float | None]]
    settling: int = 0
    trains: str = "everything"


def check_losses(losses: Mapping[str, Sequence[float]], trains: Mapping[str, str]) -> None:
    """Raise WrongResult where a column's losses are not those of the first that trains the same."""
    firsts: dict[str, str] = {}
    for name, found in losses.items():
        first = firsts.setdefault(trains[name], name)
        if not all(abs(a - b) <= LOSS_TOLERANCE for a, b in zip(found, losses[first], strict=True)):
            raise WrongResult(f"{name} has losses {found} in its first steps, {first} has {losses[first]}")


def side_by_side(columns: Sequence[Column], settings: Settings, steps: int) -> Result:
    """Rounds over columns, all alive at once; the fastest of so many ``steps`` counts. For both ranks.

    The second loss that is compared is of weights that the first step's gradients made.
    """
    ways, losses = {}, {}
    for column in columns:
        ways[column.name] = step = column.prepare()
        ranks: list[Any] = [None, None]
        dist.all_gather_object(ranks, [step() for _ in range(2)])
        losses[column.name] = next(found for found in ranks if None not in found)
    check_losses(losses, {column.name: column.trains for column in columns})
    for column in columns:
        timed(ways[column.name], column.settling)
    return run_rounds({name: lambda step=step: min(timed(step, steps)) for name, step in ways.items()}, settings)


def fastest(call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of so many calls, behind one that is not counted."""
    call()
    taken = []
    for _ in range(repeats):
        start = clock()
        call()
        taken.append(clock() - start)
    return min(taken)


def calls(
    make: Callable[[], Callable[[str], object]],
    repeats: Mapping[str, int],
    settings: Settings,
    threads: Sequence[int] = (1,),
) -> list[Result]:
    """For columns of one process: ``make()`` returns, on the first rank, what takes a column's name and does it once.

    The fastest of so many ``repeats`` counts. A result for each number of ``threads``. For both ranks.
    """
    call = make() if dist.get_rank() == 0 else None

    def seconds(name: str, count: int) -> float:
        torch.set_num_threads(count)
        taken = fastest(partial(call, name), repeats[name]) if call else 0.0
        torch.set_num_threads(1)
        return slowest([taken])[0]

    return [run_rounds({name: partial(seconds, name, count) for name in repeats}, settings) for count in threads]


# ------------------------------------------------------------------------------------------------- command line and files


def numbers(text: str) -> list[int]:
    """``1,2,4`` as a list, for argparse."""
    found = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"got {text}, must be positive numbers, e.g. 1,2")
    return found


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of the known names, for argparse."""

    def read(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"got {unknown[0]}, must be among {','.join(known)}")
        return text.split(",")

    return read


def parser(module: str, doc: str, rounds: int = 0) -> argparse.ArgumentParser:
    """The command line that all benchmarks have; ``rounds``: those of a benchmark that has rounds, by default."""
    made = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{module}", description=doc.split("\n\n")[0])
    made.add_argument("--quick", action="store_true", help="something tiny: does the benchmark work?")
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds, help=f"clean rounds wanted (default {rounds})")
        made.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return made


def settings_of(options: argparse.Namespace) -> Settings:
    """Read the settings from the command line."""
    return Settings(1, 1, 0, 2) if options.quick else Settings(options.rounds, 3 * options.rounds)


def write_json(path: Path | None, results: Mapping[str, Result]) -> None:
    """Everything measured, by what the tables have for a title."""
    if path is not None:
        versions = {"python": sys.version, "torch": torch.__version__}
        path.write_text(json.dumps(versions | {title: one._asdict() for title, one in results.items()}, indent=1))


class Lines:
    """A file with a line of JSON for each finished run. Lines of other ``settings`` are passed over (None: no line is), and so is
    half of one, which a process that was killed leaves."""

    def __init__(self, path: Path, settings: Any = None) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))

    def add(self, **line: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps({"settings": self.settings, **line}).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        whole = self.path.read_text().rpartition("\n")[0] if self.path.exists() else ""
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line.pop("settings") == self.settings or self.settings is None]


def spread(values: Sequence[float]) -> float:
    """The standard deviation of a sample, zero of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
