"""Makes the missing runs of the fine-tuning benchmark, one after another, each in two processes of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.benchmarks.elastic_finetune_plan import Job, Plan, Probed, Result, Store, mean, needed, what_is_wrong
from tests.benchmarks.elastic_finetune_run import PLACES, Part, Run, begin, evaluate, finish, steps_of_epoch, train
from tests.benchmarks.elastic_finetune_tasks import Data, Settings, layers_of
from tests.benchmarks.measure import WrongResult
from tests.benchmarks.rounds import PATIENCE, SLOWDOWN_LIMIT, probe
from tests.benchmarks.workers import Workers

Say = Callable[[str], None]


@dataclass
class Crew:
    """Where runs are made.

    Attributes:
        log: file for what the processes write.
        timeout: seconds that an epoch may take.
        together: all runs in the same two processes, which saves their start.
        probe_repeats: of the fixed computation between two epochs, see `rounds.probe`.
        patience: at most so many probes wait for a quiet machine before a run.
    """

    log: str = os.devnull
    timeout: float = 7200.0
    together: bool = False
    probe_repeats: int = 4
    patience: int = PATIENCE
    _pair: Workers | None = None

    @contextmanager
    def workers(self) -> Iterator[Workers]:
        """For one run."""
        pair = self._pair or Workers(PLACES, ("deepspeed", "ds_terapipe"), self.log, self.timeout)
        if self.together:
            self._pair = pair
            yield pair
            return
        with pair:
            yield pair

    def slowdown(self, pair: Workers) -> float:
        """As `Result.slowdown`, now."""
        found = probe(pair, self.probe_repeats)
        return max(found.together) / min(found.alone)

    def quiet(self, pair: Workers) -> float:
        """As `slowdown`, once the machine is quiet or patience has run out."""
        found = self.slowdown(pair)
        for _ in range(self.patience):
            if found <= SLOWDOWN_LIMIT:
                break
            found = self.slowdown(pair)
        return found

    def close(self) -> None:
        """End the processes."""
        if self._pair is not None:
            self._pair.close()


def sweep(plan: Plan, settings: Settings, data: Data, store: Store, crew: Crew, say: Say) -> list[Run]:
    """Make every run that is needed and not in the file; returns those that it made.

    Raises:
        WrongResult: a run did something else than what its column is about. It is not kept.
        WorkerError: a process raised or died.
    """
    made = []
    try:
        while jobs := needed(plan, store.read()):
            job = jobs[0]
            say(f"{job.run.name}: {'probe' if job.probe else 'training'}, {len(jobs)} runs known to be missing")
            with crew.workers() as pair:
                store.write(_made(job, plan, settings, data, pair, crew, say))
            made.append(job.run)
    finally:
        crew.close()
    return made


def _made(job: Job, plan: Plan, settings: Settings, data: Data, pair: Workers, crew: Crew, say: Say) -> Probed | Result:
    if job.probe:
        found = probed(pair, settings, job.run, plan.probe_steps, crew)
        say(f"  a step takes {found.median:.3f} s, the fastest {found.fastest:.3f} s")
        return found
    result = finetuned(pair, settings, job.run, data, crew, say)
    wrong = what_is_wrong(result, len(layers_of(settings, job.run.seed)))
    if wrong:
        raise WrongResult(f"{job.run.name}: {'; '.join(wrong)}")
    return result


def probed(pair: Workers, settings: Settings, run: Run, steps: int, crew: Crew) -> Probed:
    """A few steps; the first quarter of them is to settle in."""
    pair.call(begin, settings, run)
    crew.quiet(pair)
    part = slowest(pair.call(train, steps))
    pair.call(finish)
    settled = sorted(part.steps[steps // 4 :])
    return Probed(run, settled[0], settled[len(settled) // 2])


def finetuned(pair: Workers, settings: Settings, run: Run, data: Data, crew: Crew, say: Say) -> Result:
    """All epochs of a training, with dev after each and test at the end."""
    steps = steps_of_epoch(settings, data)
    pair.call(begin, settings, run)
    result = Result(run, steps, slowdown=[crew.quiet(pair)])
    totals: list[dict[str, int]] = []
    for epoch in range(settings.epochs):
        ranks = pair.call(train, steps)
        part = slowest(ranks)
        result.seconds.append(part.seconds)
        result.fastest.append(min(part.steps))
        result.losses.append(mean(part.losses))
        result.frozen.append(part.frozen)
        result.shapes.append((part.stages, part.replicas))
        result.changes.extend(part.changes)
        totals.append({name: sum(rank.counts[name] for rank in ranks) for name in part.counts})
        result.counts.append(_of_epoch(totals, result.frozen))
        result.slowdown.append(crew.slowdown(pair))
        result.dev.append(_accuracy(pair, "dev"))
        say(f"  {_epoch(result, epoch)}")
    test = _accuracy(pair, "test")
    counted = set(pair.call(finish))
    if counted != {settings.epochs * steps * settings.batch}:
        raise WrongResult(
            f"{run.name}: got {sorted(counted)} samples trained, must be {settings.epochs} epochs of {len(data.train)}"
        )
    return replace(result, test=test)


def slowest(ranks: Sequence[Part]) -> Part:
    """Of the ranks, the one that took longest."""
    return max(ranks, key=lambda part: part.seconds)


def _of_epoch(totals: Sequence[dict[str, int]], frozen: Sequence[int]) -> dict[str, int]:
    """What the last epoch has added to the counts of the cache, which counts anew when other layers are frozen."""
    now = totals[-1]
    if len(totals) < 2 or frozen[-1] != frozen[-2]:
        return now
    return {name: count - totals[-2][name] for name, count in now.items()}


def _accuracy(pair: Workers, part: str) -> float:
    right, count = pair.call(evaluate, part)[0]
    return 100 * right / count


def _epoch(result: Result, epoch: int) -> str:
    stages, replicas = result.shapes[epoch]
    counts = ", ".join(f"{name} {count}" for name, count in result.counts[epoch].items() if count)
    return (
        f"epoch {epoch}: {result.seconds[epoch]:.1f} s, fastest step {result.fastest[epoch]:.3f} s, loss "
        f"{result.losses[epoch]:.3f}, dev {result.dev[epoch]:.2f} %, {result.frozen[epoch]} frozen, {stages} stages x {replicas} "
        f"replicas, two at once {result.slowdown[epoch + 1]:.2f}x slower than one{f'; samples {counts}' if counts else ''}"
    )
