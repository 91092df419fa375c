"""LAMB and AdamW at growing batches on real text, the same number of samples at each.

``python -m tests.benchmarks.large_batch`` trains a BERT (tests/benchmarks/large_batch_run.py) on 102,400 samples per
run: 6,400 steps at batch 16, 800 at 128, 200 at 512. Two rows for each optimizer: the LR tuned at every batch, and
that of the smallest batch multiplied by sqrt(batch / smallest) at the others. Tuning takes one seed and three values,
at first: a best value at the edge of those tried has one more tried beyond it, at most ``EXTENSIONS`` times. Then the
best ones are run with the other seeds.

Each finished run is a line in the output folder; started again, the benchmark makes the missing ones.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks import measure
from tests.benchmarks.large_batch_run import Run, load_corpus, train
from tests.benchmarks.measure import Lines
from tests.spawn import run_ranks

NAMES = {"lamb": "LAMB", "adamw": "AdamW"}
# The middle one of the LRs tried first, from runs of an eighth of the samples; neighbours differ by a factor of two.
CENTRES = {"lamb": {16: 8e-3, 128: 1.13e-2, 512: 2.26e-2}, "adamw": {16: 2e-3, 128: 2.83e-3, 512: 5.66e-3}}
EXTENSIONS = 2
Losses = dict[Run, float]  # infinity: it diverged


class Plan(NamedTuple):
    """What is to be run."""

    batches: Sequence[int] = (16, 128, 512)
    seeds: Sequence[int] = (0, 1, 2)
    samples: int = 102_400

    def run(self, optimizer: str, batch: int, lr: float, seed: int | None = None) -> Run:
        """LRs are rounded to three digits, so that the same one reached by two ways is one run."""
        return Run(optimizer, batch, float(f"{lr:.3g}"), self.seeds[0] if seed is None else seed, self.samples)


def tuning(plan: Plan, optimizer: str, batch: int, done: Losses) -> tuple[Run | None, list[Run]]:
    """The best run of the tuning at ``batch``, None until that is known, and the runs that are still to be made."""
    low, high = -1, 1
    while True:
        rates = [CENTRES[optimizer][batch] * 2.0**power for power in range(low, high + 1)]
        candidates = [plan.run(optimizer, batch, rate) for rate in rates]
        if missing := [run for run in candidates if run not in done]:
            return None, missing
        best = min(candidates, key=done.__getitem__)
        if high - low >= 2 + EXTENSIONS or math.isinf(done[best]) or best not in (candidates[0], candidates[-1]):
            return best, []
        low, high = low - (best == candidates[0]), high + (best == candidates[-1])


def rows(plan: Plan, done: Losses) -> dict[str, dict[int, list[Run]]]:
    """The rows of the table: the runs of all seeds at every batch, none where the LR is not known yet."""
    found: dict[str, dict[int, list[Run]]] = {}
    for rule in ("tuned at every batch", "square-root rule"):
        for optimizer, name in NAMES.items():
            best = {batch: tuning(plan, optimizer, batch, done)[0] for batch in plan.batches}
            smallest = plan.batches[0]
            cells = found[f"{name}, {rule}"] = {}
            for batch in plan.batches:
                like = best[batch if rule.startswith("tuned") else smallest]
                rate = like and like.lr * (1 if rule.startswith("tuned") else math.sqrt(batch / smallest))
                cells[batch] = [plan.run(optimizer, batch, rate, seed) for seed in plan.seeds] if rate else []
    return found


def needed(plan: Plan, done: Losses) -> list[Run]:
    """The runs that are known to be missing, in the order they should be made: a whole table with one seed, then with
    two."""
    wanted = [run for name in NAMES for batch in plan.batches for run in tuning(plan, name, batch, done)[1]]
    known = [runs for cells in rows(plan, done).values() for runs in cells.values() if runs]
    wanted += [runs[number] for number in range(len(plan.seeds)) for runs in known]
    return [run for run in dict.fromkeys(wanted) if run not in done]


def losses_in(lines: Lines) -> Losses:
    """The finished runs of a file."""
    return {Run(**line["run"]): math.inf if line["loss"] is None else line["loss"] for line in lines.read()}


def sweep(plan: Plan, lines: Lines, jobs: int) -> None:
    """Make every run that is needed and not in the file, ``jobs`` at a time, each in a process of its own."""
    running: dict[Future[Any], Run] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while (missing := [run for run in needed(plan, losses_in(lines)) if run not in running.values()]) or running:
            for run in missing[: jobs - len(running)]:
                running[pool.submit(run_ranks, train, 1, run, timeout=measure.LONGEST_S)] = run
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, ((loss, seconds),) = running.pop(future), future.result()
                lines.add(run=run._asdict(), loss=loss, seconds=round(seconds, 1))
                measure.say(f"{run}: loss {loss}, {seconds:.0f} s; {len(missing)} runs known to be missing")


def report(plan: Plan, done: Losses) -> list[str]:
    """Markdown: validation loss in nats, mean and standard deviation over the seeds; then LAMB against AdamW."""
    heads = "".join(f" batch {batch}, {plan.samples // batch} steps |" for batch in plan.batches)
    lines, cells = [f"| |{heads}", "|---" * (len(plan.batches) + 1) + "|"], rows(plan, done)
    means: dict[tuple[str, int], tuple[float, float]] = {}
    for title, row in cells.items():
        for batch, runs in row.items():
            if runs and all(run in done for run in runs):
                values = [done[run] for run in runs]
                mean = statistics.fmean(values)
                means[title, batch] = mean, measure.spread(values) if math.isfinite(mean) else 0.0
        texts = ("{:.3f} ± {:.3f}".format(*means[title, b]) if (title, b) in means else "not finished" for b in row)
        lines.append(f"| {title} | {' | '.join(texts)} |")
    for (title, batch), (mean, deviation) in means.items():
        other = title.replace("LAMB", "AdamW"), batch
        if title.startswith("LAMB") and other in means:
            # twice the standard error of the difference
            noise = 2 * math.sqrt((deviation**2 + means[other][1] ** 2) / len(plan.seeds))
            difference = mean - means[other][0]
            word = "no difference beyond the noise" if abs(difference) <= noise else "a difference"
            lines.append(f"- batch {batch}, {title} beside AdamW: {difference:+.3f}, noise {noise:.3f}: {word}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    options = measure.parser("large_batch", __doc__)
    options.add_argument("--folder", type=Path, default=Path("runs/large_batch"), help="of the finished runs")
    options.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="runs at a time (default 1)")
    options.add_argument(
        "--batches", type=measure.numbers, default=[16, 128, 512], help="some of 16,128,512 (default all)"
    )
    options.add_argument("--seeds", help="LRs are tuned with the first (default 0,1,2; 0 with --quick)")
    options = options.parse_args(arguments)
    seeds = [int(seed) for seed in (options.seeds or ("0" if options.quick else "0,1,2")).split(",")]
    plan = Plan(options.batches, seeds, 512 if options.quick else 102_400)
    lines = Lines(options.folder / "runs.jsonl", load_corpus().digest)
    sweep(plan, lines, options.jobs)
    print("\n".join(report(plan, losses_in(lines))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
