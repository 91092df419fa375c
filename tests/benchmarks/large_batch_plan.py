"""Which runs the large-batch benchmark needs, given those that are finished: LRs to try first, then seeds of the best.

Two rows for each optimizer: the LR tuned at every batch, and that of the smallest batch multiplied by
sqrt(batch / smallest) at the others. Tuning takes one seed and three values, at first: a best value at the edge of
those tried has one more tried beyond it, at most ``EXTENSIONS`` times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.benchmarks.large_batch_run import Result, Run

EXTENSIONS = 2
NAMES = {"lamb": "LAMB", "adamw": "AdamW"}


@dataclass(frozen=True)
class Plan:
    """``centres``: (optimizer, batch, the middle one of the LRs tried first there); neighbours differ by ``factor``.

    Those here are from runs of an eighth of the samples; at the larger batches they are half of what the rule says.
    """

    batches: tuple[int, ...] = (16, 128, 512)
    samples: int = 102_400
    seeds: tuple[int, ...] = (0, 1, 2)
    warmup: float = 0.1
    centres: tuple[tuple[str, int, float], ...] = (
        ("lamb", 16, 8e-3),
        ("lamb", 128, 1.13e-2),
        ("lamb", 512, 2.26e-2),
        ("adamw", 16, 2e-3),
        ("adamw", 128, 2.83e-3),
        ("adamw", 512, 5.66e-3),
    )
    factor: float = 2.0

    def centre(self, optimizer: str, batch: int) -> float:
        """The middle one of the LRs tried first."""
        return next(rate for *place, rate in self.centres if place == [optimizer, batch])

    def run(self, optimizer: str, batch: int, learning_rate: float, seed: int) -> Run:
        """LRs are rounded to three digits, so that the same one reached by two ways is one run."""
        return Run(optimizer, batch, float(f"{learning_rate:.3g}"), seed, self.samples, self.warmup)


@dataclass(frozen=True)
class Row:
    """A row of the table: one run per seed at every batch; None at a batch whose LR is not known yet."""

    optimizer: str
    rule: str
    runs: dict[int, list[Run] | None]

    @property
    def title(self) -> str:
        return f"{NAMES[self.optimizer]}, {self.rule}"


def scaled(learning_rate: float, smallest: int, batch: int) -> float:
    """The square-root rule."""
    return learning_rate * math.sqrt(batch / smallest)


def _loss(result: Result) -> float:
    return math.inf if result.loss is None else result.loss


def tuning(plan: Plan, optimizer: str, batch: int, finished: Sequence[Result]) -> tuple[Run | None, list[Run]]:
    """The best run of the tuning at ``batch``, None until that is known, and the runs that are still to be made."""
    done = {result.run: _loss(result) for result in finished}
    centre = plan.centre(optimizer, batch)
    low, high = -1, 1
    while True:
        # Powers of the factor, each rounded by itself, so that the same value always has the same name.
        candidates = [
            plan.run(optimizer, batch, centre * plan.factor**power, plan.seeds[0]) for power in range(low, high + 1)
        ]
        missing = [run for run in candidates if run not in done]
        if missing:
            return None, missing
        best = min(candidates, key=done.__getitem__)
        if high - low >= 2 + EXTENSIONS or math.isinf(done[best]) or best not in (candidates[0], candidates[-1]):
            return best, []
        if best == candidates[0]:
            low -= 1
        else:
            high += 1


def _seeds(plan: Plan, run: Run) -> list[Run]:
    return [replace(run, seed=seed) for seed in plan.seeds]


def rows(plan: Plan, finished: Sequence[Result]) -> list[Row]:
    """The rows of the table, as far as their LRs are known."""
    smallest = plan.batches[0]

    def tuned(optimizer: str) -> dict[int, list[Run] | None]:
        best = {batch: tuning(plan, optimizer, batch, finished)[0] for batch in plan.batches}
        return {batch: run and _seeds(plan, run) for batch, run in best.items()}

    def under_the_rule(optimizer: str) -> dict[int, list[Run] | None]:
        best, _ = tuning(plan, optimizer, smallest, finished)
        if best is None:
            return dict.fromkeys(plan.batches)
        # Not of the rounded LR at one batch to the next, but each from the smallest.
        rates = {batch: scaled(best.learning_rate, smallest, batch) for batch in plan.batches}
        return {batch: _seeds(plan, plan.run(optimizer, batch, rate, plan.seeds[0])) for batch, rate in rates.items()}

    return [
        Row(optimizer, rule, runs(optimizer))
        for rule, runs in (("tuned at every batch", tuned), ("square-root rule", under_the_rule))
        for optimizer in NAMES
    ]


def needed(plan: Plan, finished: Sequence[Result]) -> list[Run]:
    """The runs that are known to be needed and not among ``finished``, in the order they should be made."""
    done = {result.run for result in finished}
    wanted = [run for name in NAMES for batch in plan.batches for run in tuning(plan, name, batch, finished)[1]]
    known = [runs for row in rows(plan, finished) for runs in row.runs.values() if runs]
    for seed in range(len(plan.seeds)):  # a whole table with one seed, then with two
        wanted += [runs[seed] for runs in known]
    return [run for run in dict.fromkeys(wanted) if run not in done]
