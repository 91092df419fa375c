"""LAMB and AdamW at growing batches on real text, the same number of samples at each.

``python -m tests.benchmarks.large_batch`` trains a BERT of 2 layers x 128 (Megatron-core, sequences of 64 bytes,
masked language modelling) on the sources of Python's standard library, 102,400 samples per run: 6,400 steps at batch
16, 800 at 128, 200 at 512. The LR climbs linearly during the first tenth of the steps, at every batch and for both
optimizers, and falls linearly to zero. tests/benchmarks/large_batch_plan.py says how LRs are chosen and which runs
follow from that.

Each finished run is a file of one JSON line in the output folder; started again, the benchmark makes the missing ones.
At the end it prints the table and writes it, with a plot, beside the runs; ``--report`` does only that.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks.large_batch_corpus import Corpus, load_corpus
from tests.benchmarks.large_batch_plan import Plan, needed
from tests.benchmarks.large_batch_report import conclusion, plot_svg, table, tuning_table
from tests.benchmarks.large_batch_run import Result, Run, Store, train

FOLDER = "runs/large_batch"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def sweep(plan: Plan, corpus: Corpus, store: Store, say: Callable[[str], None] = lambda line: None) -> list[Run]:
    """Make every run that is needed and not in ``store``, one after another; returns those it made."""
    made: list[Run] = []
    while missing := needed(plan, store.read()):
        result = train(missing[0], corpus, say)
        store.write(result)
        made.append(result.run)
        say(_finished(result, len(missing) - 1))
    return made


def _finished(result: Result, missing: int) -> str:
    loss = "diverged" if result.loss is None else f"loss {result.loss:.4f}"
    return f"{result.run.name}: {loss}, {result.seconds:.0f} s; {missing} runs known to be missing"


def _serve(text: str | None, tasks, answers) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # not to wait for tasks of a parent that was killed
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    say = logging.getLogger(__name__).info
    corpus = load_corpus(text)
    while (run := tasks.get()) is not None:
        answers.put(train(run, corpus, say))


def sweep_in_processes(plan: Plan, text: str | None, store: Store, jobs: int, say: Callable[[str], None]) -> None:
    """As ``sweep``, ``jobs`` runs at a time, each in a process of its own.

    Raises:
        RuntimeError: a process ended before its run did.
    """
    context = multiprocessing.get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    workers = [context.Process(target=_serve, args=(text, tasks, answers), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    running: set[Run] = set()
    try:
        while True:
            missing = [run for run in needed(plan, store.read()) if run not in running]
            for run in missing[: jobs - len(running)]:
                tasks.put(run)
                running.add(run)
            if not running:
                return
            result = _next_answer(answers, workers)
            store.write(result)
            running.discard(result.run)
            say(_finished(result, len(missing)))
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _next_answer(answers, workers: Sequence[multiprocessing.process.BaseProcess]) -> Result:
    while True:
        try:
            return answers.get(timeout=5)
        except queue.Empty:
            if not all(worker.is_alive() for worker in workers):
                raise RuntimeError("a process ended before its run did; its output says why") from None


def report(plan: Plan, store: Store) -> str:
    """The tables as Markdown; also written, with the plot, into the folder of the runs."""
    finished = store.read()
    seconds = sum(result.seconds for result in finished)
    parts = [
        "Validation loss in nats per masked byte, mean ± standard deviation over the seeds",
        "",
        *table(plan, finished),
        "",
        "LAMB against AdamW (noise: twice the standard error of the difference)",
        "",
        *conclusion(plan, finished),
        "",
        f"LRs tried with seed {plan.seeds[0]}",
        "",
        *tuning_table(plan, finished),
        "",
        f"{len(finished)} runs, {seconds / 60:.0f} minutes of one core, corpus {store.corpus}",
        "",
    ]
    text = "\n".join(parts)
    (store.folder / "table.md").write_text(text)
    (store.folder / "losses.svg").write_text(plot_svg(plan, finished))
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.large_batch", description=__doc__.split("\n\n")[0]
    )

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    parser.add_argument("--folder", type=Path, default=Path(FOLDER), help=f"of the finished runs (default {FOLDER})")
    parser.add_argument("--text", help="folder of *.py to train on (default: the running Python's library)")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="runs at a time (default 1)")
    parser.add_argument("--nice", type=int, default=0, help="add this to the processes' niceness (default 0)")
    parser.add_argument("--samples", type=int, default=Plan.samples, help=f"per run (default {Plan.samples})")
    parser.add_argument("--batches", type=numbers, default=Plan.batches, help="some of 16,128,512 (default all)")
    parser.add_argument(
        "--seeds", type=numbers, default=Plan.seeds, help="LRs are tuned with the first (default 0,1,2)"
    )
    parser.add_argument("--report", action="store_true", help="tables and plot of what is finished, no training")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    os.nice(options.nice)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    say = logging.getLogger(__name__).info
    plan = Plan(batches=options.batches, samples=options.samples, seeds=options.seeds)
    corpus = load_corpus(options.text)
    store = Store(options.folder, corpus.fingerprint)
    start = time.perf_counter()
    if not options.report:
        say(f"{len(corpus.training)} samples to train on, {len(corpus.validation)} held out")
        if options.jobs == 1:
            sweep(plan, corpus, store, say)
        else:
            sweep_in_processes(plan, options.text, store, options.jobs, say)
        say(f"everything finished after {(time.perf_counter() - start) / 60:.0f} minutes")
    print(report(plan, store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
