"""Which runs the fine-tuning benchmark needs, given those that are finished, and the file that these are in.

First probes of few steps: DeepSpeed's pipeline on every partition and micro-batch, its replicas and our engine on every
micro-batch; the fastest of each kind is what is trained. Then, seed by seed, both columns of DeepSpeed and ours with the cache
for every alpha. Alpha is chosen on dev; at this one alpha our other columns are trained, too.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.elastic_finetune_run import (
    CACHE,
    COLUMNS,
    FREEZE,
    OURS,
    PIPELINE,
    PLACES,
    REPLICAS,
    RESHAPE,
    Change,
    Run,
)

POINTS = 0.5  # of accuracy, in per cent, that are no loss


@dataclass(frozen=True)
class Plan:
    """What is to be run.

    Attributes:
        batch: samples of a step.
        seeds, alphas: see `Run`.
        columns: of `COLUMNS`.
        partitions, micro_batches: that are probed.
        probe_steps: of each probe.
        probe_rounds: of all probes, lest a noisy minute decides.
    """

    batch: int
    seeds: tuple[int, ...]
    alphas: tuple[float, ...]
    columns: tuple[str, ...] = COLUMNS
    partitions: tuple[str, ...] = ("uniform", "parameters")
    micro_batches: tuple[int, ...] = (4, 8, 16)
    probe_steps: int = 40
    probe_rounds: int = 2


@dataclass(frozen=True)
class Probed:
    """Seconds of the fastest step, and of the one in the middle, behind the first quarter of a probe's."""

    run: Run
    fastest: float
    median: float


@dataclass(frozen=True)
class Result:
    """A finished training; lists have an item for every epoch.

    Attributes:
        run: which one.
        steps: of an epoch.
        seconds: of all its steps, transitions between them included.
        fastest: seconds of its fastest step.
        losses: mean over its steps.
        dev: accuracy after it, in per cent.
        frozen: entries of the layer list that it trained without, at its end.
        shapes: (stages, replicas) at its end.
        counts: of the cache, samples of all ranks.
        changes: of frozen layers and of the shape.
        slowdown: how many times longer the two processes took for a fixed computation at once than one alone, at worst: before
            the first epoch, and after each.
        test: accuracy at the end, in per cent.
    """

    run: Run
    steps: int
    seconds: list[float] = field(default_factory=list)
    fastest: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    dev: list[float] = field(default_factory=list)
    frozen: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)
    test: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the training."""
        return sum(self.seconds)

    @property
    def undisturbed(self) -> float:
        """Seconds that it would have taken if all steps of an epoch were as fast as its fastest."""
        return self.steps * sum(self.fastest)


class Job(NamedTuple):
    """A run that is missing, ``probe``: as one."""

    probe: bool
    run: Run


@dataclass
class Finished:
    """What there is."""

    probes: list[Probed] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def of(self, column: str, alpha: float | None = None) -> list[Result]:
        """The runs of a column, by seed."""
        found = [one for one in self.results if (one.run.column, one.run.alpha) == (column, alpha)]
        return sorted(found, key=lambda one: one.run.seed)


# ---------------------------------------------------------------------------------------------------------- what is run


def probes(plan: Plan) -> list[Run]:
    """All probes, in order."""
    kinds = [
        (PIPELINE, plan.partitions, {PIPELINE, FREEZE}),
        (REPLICAS, ("uniform",), {REPLICAS}),
        (RESHAPE, ("uniform",), {RESHAPE, CACHE}),
    ]
    found = []
    for column, partitions, served in kinds:
        most = plan.batch // (PLACES if column == REPLICAS else 1)
        if served & set(plan.columns):
            found += [
                Run(column, plan.seeds[0], None, partition, size)
                for partition in partitions
                for size in plan.micro_batches
                if most % size == 0
            ]
    return found


def fastest(column: str, probed: Iterable[Probed]) -> Run | None:
    """The probe of a column whose fastest step is fastest."""
    found = [one for one in probed if one.run.column == column]
    return min(found, key=lambda one: one.fastest).run if found else None


def trained(plan: Plan, column: str, seed: int, alpha: float | None, probed: Sequence[Probed]) -> Run:
    """A run of a column as it was fastest: ours without a reshape in the way of DeepSpeed's pipeline."""
    like = fastest({FREEZE: PIPELINE, CACHE: RESHAPE}.get(column, column), probed)
    assert like is not None
    return Run(column, seed, alpha, like.partition, like.micro_batch)


def needed(plan: Plan, finished: Finished) -> list[Job]:
    """What is missing, as far as that is known, in order; neighbours change from seed to seed."""
    probed, runs = Counter(one.run for one in finished.probes), probes(plan)
    for number in range(plan.probe_rounds):
        missing = [run for run in runs if probed[run] <= number]
        if missing:
            more = (plan.probe_rounds - 1 - number) * runs
            return [Job(True, run) for run in (*missing, *more)]
    done = {one.run for one in finished.results}
    kinds = [*((column, None) for column in (PIPELINE, REPLICAS)), *((CACHE, alpha) for alpha in plan.alphas)]
    wanted = _of_seeds(plan, kinds, finished.probes)
    alpha = chosen_alpha(plan, finished)
    if alpha is not None:
        wanted += _of_seeds(plan, [(FREEZE, alpha), (RESHAPE, alpha)], finished.probes)
    return [Job(False, run) for run in wanted if run not in done]


def _of_seeds(plan: Plan, kinds: Sequence[tuple[str, float | None]], probed: Sequence[Probed]) -> list[Run]:
    kinds = [kind for kind in kinds if kind[0] in plan.columns]
    return [
        trained(plan, column, seed, alpha, probed)
        for number, seed in enumerate(plan.seeds)
        for column, alpha in (kinds if number % 2 == 0 else kinds[::-1])
    ]


# ------------------------------------------------------------------------------------------------------------- accuracy


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample; zero of a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def allowance(one: Sequence[float], other: Sequence[float]) -> float:
    """Points of accuracy that are no loss: half a point, or a standard deviation of both together where that is more."""
    pooled = math.sqrt((spread(one) ** 2 + spread(other) ** 2) / 2)
    return max(POINTS, pooled)


def chosen_alpha(plan: Plan, finished: Finished) -> float | None:
    """The fastest whose accuracy on dev is no loss against DeepSpeed's pipeline; where there is none, the most accurate.

    None until all runs are there that it depends on.
    """
    if CACHE not in plan.columns or len(plan.alphas) == 1:
        return plan.alphas[0]

    def of(column: str, alpha: float | None = None) -> list[Result]:
        return [one for one in finished.of(column, alpha) if one.run.seed in plan.seeds]

    of_alpha, pipeline = {alpha: of(CACHE, alpha) for alpha in plan.alphas}, of(PIPELINE)
    if not plan.seeds or any(len(some) < len(plan.seeds) for some in of_alpha.values()):
        return None
    if PIPELINE in plan.columns and len(pipeline) < len(plan.seeds):
        return None
    dev = {alpha: [one.dev[-1] for one in some] for alpha, some in of_alpha.items()}
    theirs = [one.dev[-1] for one in pipeline]
    good = [
        alpha for alpha in plan.alphas if theirs and mean(dev[alpha]) >= mean(theirs) - allowance(dev[alpha], theirs)
    ]
    if not good:
        return max(plan.alphas, key=lambda alpha: mean(dev[alpha]))
    return min(good, key=lambda alpha: mean([one.total for one in of_alpha[alpha]]))


def expected_frozen(alpha: float | None, entries: int, epochs: int) -> list[int]:
    """Entries of a layer list, all with weights, that each epoch trains without.

    Of the L before the head these are L (1 - (1 - alpha)^T) after T epochs, rounded up.
    """
    if alpha is None:
        return [0] * epochs
    return [math.ceil((entries - 1) * (1 - (1 - alpha) ** epoch) - 1e-9) for epoch in range(epochs)]


def what_is_wrong(result: Result, entries: int) -> list[str]:
    """Where a training was not what its column is about."""
    run, wrong = result.run, []
    expected = expected_frozen(run.alpha, entries, len(result.seconds))
    if result.frozen != expected:
        wrong.append(f"frozen layers: got {result.frozen}, must be {expected}")
    begins = [epoch * result.steps for epoch in range(1, len(expected)) if expected[epoch] > expected[epoch - 1]]
    before, at = 0, []
    for change in result.changes:
        at += [change.step] if change.frozen != before else []
        before = change.frozen
    if at != begins:
        wrong.append(f"layers were frozen before steps {at}, must be {begins}")
    moved = any((change.stages, change.replicas) == (1, PLACES) for change in result.changes)
    if moved != (run.column in (RESHAPE, CACHE)):
        wrong.append(f"shapes: got {result.shapes}, must {'become' if run.column in OURS else 'stay as'} launched")
    used = sum(counts.get("read", 0) + counts.get("continued", 0) for counts in result.counts)
    kept_on = any(a and a == b for a, b in pairwise(expected))
    read = sum(counts.get("read", 0) for counts in result.counts)
    # with more layers frozen than before entries are what the further layers start from, with as many they are read
    if (used > 0) != (run.column == CACHE) or (run.column == CACHE and kept_on and not read):
        wrong.append(f"cache: got {result.counts}")
    return wrong


# ------------------------------------------------------------------------------------------------------------- the file


class Store:
    """A file with one line of JSON for each finished probe and run; those of other settings are not of this benchmark.

    Args:
        path: of the file.
        settings: of the benchmark, as JSON has them; None: those of the last line.
    """

    def __init__(self, path: Path, settings: dict[str, Any] | None) -> None:
        self.path = path
        if settings is None:
            settings = self._lines()[-1]["settings"]
        self.settings = json.loads(json.dumps(settings))

    def write(self, one: Probed | Result) -> None:
        """Add a line. What a process that was killed left of one is removed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(
            {"kind": "probe" if isinstance(one, Probed) else "run", "settings": self.settings, **asdict(one)}
        )
        with open(self.path, "ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Finished:
        """All that is finished."""
        found = Finished()
        for line in self._lines():
            if line.pop("settings") != self.settings:
                continue
            kind, run = line.pop("kind"), Run(**line.pop("run"))
            if kind == "probe":
                found.probes.append(Probed(run, **line))
            else:
                line["shapes"] = [(stages, replicas) for stages, replicas in line["shapes"]]
                changes = [Change(**change) for change in line.pop("changes")]
                found.results.append(Result(run, changes=changes, **line))
        return found

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        whole, _, _ = self.path.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]


def plan_of(finished: Finished) -> Plan:
    """The plan that these runs are of, as far as they go: with the seeds that all of them have, between which alpha is chosen."""
    runs = [one.run for one in finished.results]
    alphas = sorted({run.alpha for run in runs if run.alpha is not None})
    columns = tuple(column for column in COLUMNS if any(run.column == column for run in runs))
    compared = [run for run in runs if run.column in (PIPELINE, CACHE)] or runs
    kinds = {(run.column, run.alpha) for run in compared}
    seeds = [{run.seed for run in compared if (run.column, run.alpha) == kind} for kind in kinds]
    return Plan(0, tuple(sorted(set.intersection(*seeds))), tuple(alphas) or (1 / 3,), columns)
