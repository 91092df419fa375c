"""Several columns side by side on one workload: started, checked against each other, timed in rounds, memory read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from tests.benchmarks.columns import Column, Workload, prepare, timed_step, untimed_step
from tests.benchmarks.rounds import PATIENCE, Minima, Probe, minima, probe, run_rounds
from tests.benchmarks.workers import PeakMemory, WorkerError, Workers, peak_memory

LOSS_TOLERANCE = 1e-4


class WrongResult(AssertionError):
    """A column trained something else than the others: its time means nothing."""


@dataclass(frozen=True)
class Result:
    """What was measured on one workload, by column name. ``failures`` holds the last line of what a column raised."""

    minima: Minima
    memory: dict[str, list[PeakMemory]]
    losses: dict[str, list[float]]
    failures: dict[str, str]

    def seconds(self, name: str) -> float | None:
        """Seconds per step of a column, None when it failed or was not run."""
        return None if name in self.failures else self.minima.seconds.get(name)


@dataclass(frozen=True)
class Settings:
    """``rounds`` clean rounds of ``steps`` steps are wanted, at most ``attempts`` tried; ``probe_repeats`` as in
    rounds.probe, ``patience`` as in rounds.run_rounds; a request is waited for ``timeout`` seconds; the workers' own output
    goes to the file ``log``.
    """

    rounds: int = 5
    attempts: int = 12
    steps: int = 1
    probe_repeats: int = 16
    timeout: float = 300.0
    log: str = os.devnull
    patience: int = PATIENCE


class Fleet:
    """One process group per column, so that none shares an allocator, groups or threads with another; all stay alive
    and idle while one of them works. A context manager: no worker outlives it.
    """

    def __init__(self, columns: Sequence[Column], workload: Workload, settings: Settings):
        self.settings = settings
        self.failures: dict[str, str] = {}
        self.losses: dict[str, list[float]] = {}
        self._trains = {column.name: column.trains for column in columns}
        self.groups: dict[str, Workers] = {}
        self._bare: Workers | None = None
        try:
            for column in columns:
                self.groups[column.name] = Workers(
                    column.world, column.modules, settings.log, settings.timeout, column.checkout
                )
            if not any(group.world > 1 for group in self.groups.values()):
                self._bare = Workers(2, (), settings.log, settings.timeout)
            self._started()
            for column in columns:  # one after the other: all at once they may take longer than ``timeout``
                self._first_losses(column, workload)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for group in (*self.groups.values(), *((self._bare,) if self._bare else ())):
            group.close()

    def _failed(self, name: str, error: WorkerError) -> None:
        self.failures[name] = str(error).strip().splitlines()[-1]

    def _started(self) -> None:
        """Wait until all workers have imported what they need, and put them to sleep."""
        for name, group in self.groups.items():
            try:
                group.collect()
            except WorkerError as error:
                self._failed(name, error)
        self.sleep()

    def _first_losses(self, column: Column, workload: Workload) -> None:
        if column.name in self.failures:
            return
        group = self.groups[column.name]
        try:
            with group.awake():
                ranks = group.call(prepare, column, workload)
            self.losses[column.name] = next(losses for losses in ranks if None not in losses)
        except WorkerError as error:
            self._failed(column.name, error)

    def settle(self, columns: Sequence[Column]) -> None:
        """One column after the other while the rest stand still: what one measures of itself must not be of them."""
        self.sleep()
        for column in (each for each in columns if each.name not in self.failures):
            try:
                with self.groups[column.name].awake():
                    for _ in range(column.settling):
                        self.groups[column.name].call(untimed_step)
            except WorkerError as error:
                self._failed(column.name, error)

    def check_losses(self) -> None:
        """Every column's losses of its first two steps are those of the first that trains the same. Raises WrongResult."""
        firsts: dict[str, tuple[str, list[float]]] = {}
        for name, losses in self.losses.items():
            first, expected = firsts.setdefault(self._trains[name], (name, losses))
            if not all(
                math.isclose(a, b, rel_tol=0, abs_tol=LOSS_TOLERANCE) for a, b in zip(losses, expected, strict=True)
            ):
                raise WrongResult(f"{name} has losses {losses} in its first steps, {first} has {expected}")

    def step_seconds(self, name: str) -> float:
        """Seconds of the column's fastest of ``steps`` steps, a step being as long as on its slowest rank."""
        if name in self.failures:
            return math.inf
        try:
            with self.groups[name].awake():
                steps = [self.groups[name].call(timed_step) for _ in range(self.settings.steps)]
        except WorkerError as error:
            self._failed(name, error)
            return math.inf
        return min(max(seconds for seconds, _ in ranks) for ranks in steps)

    def probe(self) -> Probe:
        """The probe, run in the first two processes that also train (in two of its own if there are none)."""
        alive = [group for name, group in self.groups.items() if group.world > 1 and name not in self.failures]
        if not alive and self._bare is None:
            self._bare = Workers(2, (), self.settings.log, self.settings.timeout)
        group = alive[0] if alive else self._bare
        assert group is not None
        with group.awake():
            return probe(group, self.settings.probe_repeats)

    def sleep(self) -> None:
        """Stop every worker until it is asked for something."""
        for group in self.groups.values():
            with group.awake():
                pass

    def memory(self) -> dict[str, list[PeakMemory]]:
        """Peak memory of every rank of every column that did not fail."""
        found = {}
        for name, group in self.groups.items():
            if name not in self.failures:
                with group.awake():
                    found[name] = group.call(peak_memory)
        return found


def measure(
    columns: Sequence[Column], workload: Workload, settings: Settings, report: Callable[[str], None] = lambda line: None
) -> Result:
    """Run ``columns`` side by side; a failing one is in the result. Raises WrongResult when they train differently."""
    with Fleet(columns, workload, settings) as fleet:
        fleet.check_losses()
        memory = fleet.memory()  # of the first two steps, before the probes add their own to two of the workers
        fleet.settle(columns)
        for name, reason in fleet.failures.items():
            report(f"{name} failed: {reason}")
        alive = {
            name: lambda name=name: fleet.step_seconds(name) for name in fleet.groups if name not in fleet.failures
        }
        rounds = run_rounds(alive, fleet.probe, settings.rounds, settings.attempts, report, settings.patience)
        return Result(minima(rounds), memory, fleet.losses, dict(fleet.failures))
