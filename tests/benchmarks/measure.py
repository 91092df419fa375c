"""Rounds, probes and columns: how every benchmark of speed takes its figures, and how trainings to their end are resumed.

The method is that of docs/benchmarks.md. No round begins before a probe is below the limit, as far as patience goes. What is
measured runs in processes of one thread, on all ranks alike (:func:`on_ranks`).
"""

import argparse
import json
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests import device
from tests.spawn import run_ranks

SLOWDOWN_LIMIT, CLEAN_ROUNDS, LOSS_TOLERANCE, BF16_TOLERANCE = 1.15, 3, 1e-4, 2.0**-5  # bf16 rounds a loss of 4 to 8 twice
# Peers run without our hook in DeepSpeed. In every column glibc keeps what a step frees for the next one: by itself it gives
# large blocks back, and zeroes thousands of pages in every step.
ENVIRONMENT = {
    "DS_TERAPIPE_AUTOLOAD": "0",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # bytes of a block; the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**30),  # bytes free at the end of the heap, before any is given back
}


class WrongResult(AssertionError):
    """A column trained something else than the others: its time means nothing."""


def on_ranks(function: Callable[..., Any], *arguments: Any, ranks: int = 2) -> Any:
    """Run ``function(*arguments)`` on all ranks; return the first one's result. Raises AssertionError where one fails."""
    return run_ranks(_on_rank, ranks, function, *arguments, timeout=7 * 24 * 3600.0, env=ENVIRONMENT)[0]


def _on_rank(rank: int, world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # DeepSpeed's log
    return function(*arguments)


def say(line: str) -> None:
    """Progress, of the first rank, goes to stderr, results to stdout."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def slowest(seconds: Sequence[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64, device=device.NAME)
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


class Settings(NamedTuple):
    """So many clean rounds are wanted and so many tried at most; ``patience`` probes wait for a quiet machine before each, of
    ``repeats`` fixed computations."""

    rounds: int = 5
    attempts: int = 15
    patience: int = 30 if device.NAME == "cpu" else 0  # cores are not all that a GPU's step waits for
    repeats: int = 16


Probe = tuple[float, float]  # seconds of the faster rank alone, and of the slower one when both run at once


def probe(settings: Settings) -> Probe:
    """Passes of an MLP of 512 x 2048 over 1024 tokens, a mix like that of a GPT: on each rank alone, then on all at once."""
    hidden, up, down = (torch.ones(shape) for shape in ((1024, 512), (512, 2048), (2048, 512)))
    world = dist.get_world_size()
    mine = [0.0] * (world + 1)
    for turn in range(world + 1):
        dist.barrier()
        if turn in (dist.get_rank(), world):
            mine[turn] = timeit.timeit(lambda: torch.mm(F.gelu(torch.mm(hidden, up)), down), number=settings.repeats)
    *alone, together = slowest(mine)
    return min(alone), together


def slowdown_of(*probes: Probe) -> float:
    """Ratio of the time of two at once to that of one alone, at worst."""
    return max(together for _, together in probes) / min(alone for alone, _ in probes)


def quiet(settings: Settings) -> Probe:
    """The first probe of a quiet machine, or the one at which patience ends."""
    found, left = probe(settings), settings.patience
    while slowdown_of(found) > SLOWDOWN_LIMIT and left:
        found, left = probe(settings), left - 1
    return found


class Round(NamedTuple):
    """The slowdown by the probes around it, and the seconds of every column."""

    slowdown: float
    seconds: dict[str, float]

    @property
    def clean(self) -> bool:
        return self.slowdown <= SLOWDOWN_LIMIT


class Result(NamedTuple):
    rounds: Sequence[Round]

    @property
    def counted(self) -> Sequence[Round]:
        """The clean ones, or all where none is."""
        return [one for one in self.rounds if one.clean] or self.rounds

    @property
    def seconds(self) -> dict[str, float]:
        """Minima of the columns over the rounds that count."""
        return {name: min(one.seconds[name] for one in self.counted) for name in self.rounds[0].seconds}

    @property
    def state(self) -> str:
        """Number of clean rounds, and whether these are enough."""
        clean = sum(one.clean for one in self.rounds)
        slowdown = statistics.median(one.slowdown for one in self.counted)
        few = "" if clean >= CLEAN_ROUNDS else f"INCONCLUSIVE, fewer than {CLEAN_ROUNDS} clean: "
        return f"{few}{clean} clean rounds of {len(self.rounds)}, two at once {slowdown:.2f}x slower than one"

    def table(self, title: str, reference: str) -> list[str]:
        """A line for each column, with the ratios to one of them."""
        seconds = self.seconds
        base = seconds.get(reference, float("nan"))
        heads = f"{'':38}{'seconds':>13}{'x its time':>12}{'x its speed':>13}   it: {reference}"
        lines = [f"{name:38}{one:13.4g}{one / base:12.2f}{base / one:13.2f}" for name, one in seconds.items()]
        return [f"{title}: {self.state}", heads, *lines]


def run_rounds(columns: Mapping[str, Callable[[], float]], settings: Settings) -> Result:
    """Rounds over ``columns`` (name and what measures its seconds) until enough are clean or the attempts end.

    The order is reversed every other round, so that no column always follows the same neighbour.
    """
    rounds: list[Round] = []
    while len(rounds) < settings.attempts and sum(one.clean for one in rounds) < settings.rounds:
        before = quiet(settings)
        seconds = {name: columns[name]() for name in list(columns)[:: -1 if len(rounds) % 2 else 1]}
        rounds.append(Round(slowdown_of(before, probe(settings)), seconds))
        found = ", ".join(f"{name} {one:.4g}" for name, one in seconds.items())
        say(f"round {len(rounds)}: two at once {rounds[-1].slowdown:.2f}x slower than one; {found}")
    return Result(rounds)


class Column(NamedTuple):
    """A way to train. ``prepare()`` returns a step: a callable that trains once and returns the loss, on one rank at least."""

    name: str
    prepare: Callable[[], Callable[[], float | None]]
    settling: int = 0  # steps that it takes until it is as fast as it will be
    trains: str = "everything"  # columns that train the same have the same losses


def check_losses(losses: Mapping[str, Sequence[float]], trains: Mapping[str, str], limit: float = LOSS_TOLERANCE) -> None:
    """Raise WrongResult where a column's losses are not those of the first that trains the same."""
    firsts: dict[str, str] = {}
    for name, found in losses.items():
        first = firsts.setdefault(trains[name], name)
        if not all(abs(a - b) <= limit for a, b in zip(found, losses[first], strict=True)):
            raise WrongResult(f"{name} has losses {found} in its first steps, {first} has {losses[first]}")


def side_by_side(columns: Sequence[Column], settings: Settings, steps: int, limit: float = LOSS_TOLERANCE) -> Result:
    """Rounds over columns, all alive at once; the fastest of so many ``steps`` counts. For both ranks.

    The second loss that is compared is of weights that the first step's gradients made.
    """
    ways, losses = {}, {}
    for column in columns:
        ways[column.name] = step = column.prepare()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, [step() for _ in range(2)])
        losses[column.name] = next(found for found in ranks if None not in found)
        say(f"{column.name}: losses {losses[column.name]}")
    check_losses(losses, {column.name: column.trains for column in columns}, limit)
    for column in columns:
        timed(ways[column.name], column.settling)
    return run_rounds({name: lambda step=step: min(timed(step, steps)) for name, step in ways.items()}, settings)


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """``1,2,4`` as a list, for argparse."""
    return lambda text: [kind(part) for part in text.split(",")]


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


class Report:
    """Results that are printed as they come, and of which ``--json`` keeps all that was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._file, self._found = options.json, {"python": sys.version, "torch": torch.__version__}

    def add(self, title: str, result: Result, lines: Sequence[str]) -> None:
        print("\n".join([*lines, ""]), flush=True)
        self._found[title] = {"seconds": result.seconds, "rounds": [one._asdict() for one in result.rounds]}
        if self._file is not None:
            self._file.write_text(json.dumps(self._found, indent=1))


class Lines:
    """A file with a line of JSON for each finished run, a NamedTuple of a ``kind``. Lines of other ``settings`` are passed over
    (None: no line is), and so is half of one, which a process that was killed leaves."""

    def __init__(self, path: Path, kind: Any, settings: Any = None) -> None:
        self.path, self.kind, self.settings = path, kind, json.loads(json.dumps(settings))

    def add(self, run: Any, **found: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(json.dumps({"settings": self.settings, "run": run._asdict(), **found}).encode() + b"\n")

    def read(self) -> dict[Any, dict[str, Any]]:
        whole = self.path.read_text().rpartition("\n")[0] if self.path.exists() else ""
        lines = [json.loads(line) for line in whole.splitlines()]
        return {self.kind(**line.pop("run")): line for line in lines if self.settings in (None, line.pop("settings"))}


def sweep(needed: Callable[[Any], list[Any]], make: Callable[[Any], dict[str, Any]], lines: Lines, jobs: int = 1) -> Any:
    """Make every run that is needed and not in the file, ``jobs`` at a time; the results of all."""
    running: dict[Future[Any], Any] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while (missing := [run for run in needed(lines.read()) if run not in running.values()]) or running:
            for run in missing[: jobs - len(running)]:
                say(f"{run}: {len(missing)} runs known to be missing")
                running[pool.submit(make, run)] = run
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                lines.add(running.pop(future), **future.result())
    return lines.read()


def spread(values: Sequence[float]) -> float:
    """The standard deviation of a sample, zero of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
