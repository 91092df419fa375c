"""What freezing is worth on a real task: time and accuracy of a fine-tuning, beside DeepSpeed's pipeline and data parallelism.

``python -m tests.benchmarks.elastic_finetune --data FOLDER`` fine-tunes a BERT on SST-2 in two processes of one thread,
``--task vit`` a small vision Transformer on images, ``--task gpt`` a small GPT on Python's standard library. First come probes
of few steps: DeepSpeed's pipeline on every partition and micro-batch, its replicas and our engine on every micro-batch; the
fastest of each kind is trained. Then, seed by seed, all columns: ours with the cache for every alpha, without it for the first.

Times are those of all training steps, changes of shape between them included, evaluations not. Each finished run is a line in the
output folder; started again, the benchmark makes the missing ones.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tests.benchmarks import measure
from tests.benchmarks.elastic_finetune_run import COLUMNS, OURS, PLACES, Run, probed, trained
from tests.benchmarks.elastic_finetune_tasks import TASKS, Settings, read
from tests.benchmarks.measure import Lines, mean_and_spread

TITLES = {
    "pipeline": "DeepSpeed, pipeline of two stages",
    "replicas": "DeepSpeed, data parallel",
    "freeze": "ours, freezing alone",
    "reshape": "ours, with the reshape",
    "cache": "ours with cache",
}


class Plan(NamedTuple):
    """What is to be run; ``rounds``: of all probes, so that no noisy minute decides."""

    seeds: Sequence[int]
    alphas: Sequence[float]
    columns: Sequence[str] = COLUMNS
    micro_batches: Sequence[int] = (4, 8, 16)
    rounds: int = 2
    batch: int = 32


class Finished(NamedTuple):
    """What there is: (run, seconds of its fastest step) of each probe, and what `trained` found, by run."""

    probes: list[tuple[Run, float]]
    results: dict[Run, dict[str, Any]]

    def of(self, column: str, alpha: float | None = None) -> list[dict[str, Any]]:
        return [found for run, found in self.results.items() if (run.column, run.alpha) == (column, alpha)]


def finished_in(lines: Lines) -> Finished:
    """The finished runs of a file."""
    found = [(Run(**line.pop("run")), line) for line in lines.read()]
    probes = [(run, line["step"]) for run, line in found if "step" in line]
    return Finished(probes, {run: line for run, line in found if "step" not in line})


def probes(plan: Plan) -> list[Run]:
    """All probes, in order."""
    kinds = [
        ("pipeline", ("uniform", "parameters"), {"pipeline", "freeze"}),
        ("replicas", ("uniform",), {"replicas"}),
        ("reshape", ("uniform",), {"reshape", "cache"}),
    ]
    return [
        Run(column, plan.seeds[0], None, partition, size)
        for column, partitions, served in kinds
        if served & set(plan.columns)
        for partition in partitions
        for size in plan.micro_batches
        if plan.batch // (PLACES if column == "replicas" else 1) % size == 0
    ]


def kinds_of(plan: Plan) -> list[tuple[str, float | None]]:
    """(column, alpha) of the rows."""
    kinds = [("pipeline", None), ("replicas", None), ("freeze", plan.alphas[0]), ("reshape", plan.alphas[0])]
    return [kind for kind in [*kinds, *(("cache", alpha) for alpha in plan.alphas)] if kind[0] in plan.columns]


def needed(plan: Plan, finished: Finished) -> list[tuple[bool, Run]]:
    """(whether it is a probe, the run) of what is missing, as far as that is known; neighbours change from seed to seed."""
    made = Counter(run for run, _ in finished.probes)
    for number in range(plan.rounds):
        if missing := [(True, run) for run in probes(plan) if made[run] <= number]:
            return missing
    wanted = []
    for number, seed in enumerate(plan.seeds):
        for column, alpha in kinds_of(plan)[:: -1 if number % 2 else 1]:
            like = {"freeze": "pipeline", "cache": "reshape"}.get(column, column)
            fastest = min((step, run) for run, step in finished.probes if run.column == like)[1]
            wanted.append(Run(column, seed, alpha, fastest.partition, fastest.micro_batch))
    return [(False, run) for run in wanted if run not in finished.results]


def sweep(plan: Plan, settings: Settings, lines: Lines) -> None:
    """Make every run that is needed and not in the file, one after another, each in two processes of its own."""
    rounds, steps = (
        (measure.Settings(patience=0, repeats=1), 4) if settings.quick else (measure.Settings(repeats=4), 40)
    )
    while missing := needed(plan, finished_in(lines)):
        is_probe, run = missing[0]
        measure.say(f"{run}: {'probe' if is_probe else 'training'}, {len(missing)} runs known to be missing")
        if is_probe:
            lines.add(run=run._asdict(), step=measure.on_ranks(probed, settings, run, steps, rounds))
        else:
            lines.add(run=run._asdict(), **measure.on_ranks(trained, settings, run, rounds))


def table(plan: Plan, finished: Finished) -> list[str]:
    """Markdown: seconds and accuracies, mean and standard deviation over the seeds.

    At each epoch's fastest step: as if all steps of an epoch were as fast. Noise: the mean of the probes' slowdowns.
    """
    heads = [
        "",
        "seeds",
        "seconds",
        "as fast as the pipeline",
        "seconds at each epoch's fastest step",
        "dev, %",
        "test, %",
    ]
    lines = [f"| {' | '.join([*heads, 'noise'])} |", "|---" * 8 + "|"]
    pipeline = [sum(one["seconds"]) for one in finished.of("pipeline")]
    for column, alpha in kinds_of(plan):
        if some := finished.of(column, alpha):
            seconds = [sum(one["seconds"]) for one in some]
            cells = [
                TITLES[column] + (f", alpha {alpha:.3g}" if column in OURS else ""),
                str(len(some)),
                mean_and_spread(seconds, 1),
                f"{fmean(pipeline) / fmean(seconds):.2f}" if pipeline else "",
                mean_and_spread([one["steps"] * sum(one["fastest"]) for one in some], 0),
                mean_and_spread([one["dev"][-1] for one in some], 2),
                mean_and_spread([one["test"] for one in some], 2),
                f"{fmean(each for one in some for each in one['slowdown']):.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def fractions(text: str) -> tuple[float, ...]:
    """``1/4,1/2`` as numbers, for argparse."""
    parts = [part.partition("/") for part in text.split(",")]
    found = tuple(float(above) / float(below or 1) for above, _, below in parts)
    if not all(0 < alpha < 1 for alpha in found):
        raise argparse.ArgumentTypeError(f"got {text}, must be above 0 and below 1, e.g. 1/3")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status 1 where data are missing."""
    options = measure.parser("elastic_finetune", __doc__)
    add = options.add_argument
    add("--task", choices=sorted(TASKS), default="bert", help="default bert")
    add("--data", help="folder of sentences (bert), zip file of images (vit)")
    add("--folder", type=Path, default=Path("runs/elastic_finetune"), help="of the finished runs")
    add("--seeds", type=int, help="runs of each column (default 3; 1 for vit, gpt and --quick)")
    add("--alphas", type=fractions, help="e.g. 1/4,1/2 (default 1/4,1/3,2/5,1/2; 1/3 for vit, gpt and --quick)")
    add("--columns", type=measure.names(COLUMNS), default=COLUMNS, help=f"of {','.join(COLUMNS)} (default all)")
    add("--limit", type=int, help="samples of each part at most (default 4096 for gpt, else all)")
    add("--micro-batches", type=measure.numbers, default=[4, 8, 16], help="that are probed (default 4,8,16)")
    add("--probe-rounds", type=int, default=2, help="of all probes (default 2)")
    options = options.parse_args(arguments)
    title, defaults = TASKS[options.task]
    defaults = {**defaults, **({"seeds": 1, "alphas": (1 / 3,), "limit": 64} if options.quick else {})}
    seeds, alphas, limit = (getattr(options, name) or defaults.get(name) for name in ("seeds", "alphas", "limit"))
    settings = Settings(options.task, options.data, options.quick, limit, defaults["lr"])
    plan = Plan(range(seeds), alphas, options.columns, options.micro_batches, options.probe_rounds)
    if options.quick:
        settings = Settings(options.task, None, True, limit, defaults["lr"], epochs=4, batch=8)
        plan = plan._replace(micro_batches=[4], rounds=1, batch=8)
    try:
        read(settings)
    except ValueError as error:
        print(error)
        return 1
    lines = Lines(options.folder / f"{options.task}.jsonl", asdict(settings))
    sweep(plan, settings, lines)
    print("\n".join([title, "", *table(plan, finished_in(lines))]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
