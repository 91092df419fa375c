"""The time of a LAMB step against fused AdamW and eager PyTorch, over the tensors of BERT.

``python -m tests.benchmarks.lamb`` times BERT-base and BERT-large shapes with 1 and 2 threads on a CPU and, where there
is a GPU, BERT-large and GPT-1.3B shapes on it (tests/benchmarks/lamb_cuda.py). tests/benchmarks/rounds.py says how CPU
figures are taken; AdamW is timed twice in a round, what the two differ by is the noise. Bytes per parameter are counted
from the algorithms (tests/benchmarks/lamb_cases.py) and held against a stream measured in the same rounds. ``--quick``
runs tiny tensors through all of it and shows that the benchmark works, not how fast anything is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence

import torch

from tests.benchmarks import lamb_cases, lamb_cuda
from tests.benchmarks.lamb_shapes import MODELS
from tests.benchmarks.lamb_table import Case, as_json, class_table, table, target_lines
from tests.benchmarks.rounds import PATIENCE, minima, probe, run_rounds
from tests.benchmarks.workers import Workers


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> list[Case]:
    """Every model at every number of threads, one model in memory at a time.

    Worker 0 does the steps; worker 1 is there for the probe, which says whether the other core was free.
    """
    cases = []
    repeats, patience = (2, 0) if options.quick else (16, PATIENCE)
    with Workers(2, (), options.log, options.timeout) as workers:
        for model in options.models:
            say(f"{model}: allocating")
            workers.call(lamb_cases.prepare, model, ranks=[0])
            for threads in options.threads:
                say(f"{model}, threads: {threads}")
                names = lamb_cases.columns(eager=not options.no_eager, classes=not options.no_classes)

                def one(column: str, threads: int = threads) -> Callable[[], float]:
                    steps = min(2, options.steps) if column == "eager" else options.steps
                    return lambda: workers.call(lamb_cases.timed, column, threads, steps, ranks=[0])[0]

                columns = {name: one(name) for name in names}
                rounds = run_rounds(
                    columns, lambda: probe(workers, repeats), options.rounds, options.attempts, say, patience
                )
                cases.append(Case(model, MODELS[model](), threads, minima(rounds)))
                print("\n".join(["", *table(cases[-1]), "", *class_table(cases[-1])]), flush=True)
    return cases


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.lamb", description=__doc__.split("\n\n")[0])

    def models(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in MODELS]:
            raise argparse.ArgumentTypeError(f"got {','.join(unknown)}, must be among {','.join(MODELS)}")
        return text.split(",")

    def numbers(text: str) -> list[int]:
        if not all(part.isdecimal() and int(part) for part in text.split(",")):
            raise argparse.ArgumentTypeError(f"got {text}, must be positive numbers, e.g. 1,2")
        return [int(part) for part in text.split(",")]

    parser.add_argument("--models", type=models, help="default bert-base,bert-large; tiny with --quick")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="default 1,2")
    parser.add_argument("--rounds", type=int, help="clean rounds wanted per table (default 5; 1 with --quick)")
    parser.add_argument("--attempts", type=int, help="rounds tried at most per table (default: 4 times --rounds)")
    parser.add_argument("--steps", type=int, default=5, help="steps per measurement, the fastest counts (default 5)")
    parser.add_argument("--no-eager", action="store_true", help="without LAMB in eager PyTorch")
    parser.add_argument("--no-classes", action="store_true", help="without the table by size class")
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="all", help="default: what there is")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument("--log", metavar="FILE", default=os.devnull, help="the workers' own output (default: nowhere)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a worker (default 600)")
    parser.add_argument("--quick", action="store_true", help="tiny tensors: does the benchmark work?")
    options = parser.parse_args(arguments)
    options.models = options.models or (["tiny"] if options.quick else ["bert-base", "bert-large"])
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.attempts = options.attempts or (options.rounds if options.quick else 4 * options.rounds)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    say = logging.getLogger(__name__).info
    written: dict[str, object] = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    }
    if options.device != "cuda":
        cases = measure(options, say)
        print("\n".join(["", "Targets", *(line for case in cases for line in target_lines(case))]), flush=True)
        written["cpu"] = [as_json(case) for case in cases]
    if options.device != "cpu" and torch.cuda.is_available():
        found = lamb_cuda.measure(["tiny"] if options.quick else ["bert-large", "gpt-1.3b"], say)
        print("\n".join(["", *lamb_cuda.table(found), "", "Targets", *lamb_cuda.target_lines(found)]))
        written["cuda"] = [one._asdict() for one in found]
    elif options.device != "cpu":
        print("\nCUDA: not measured, there is no GPU")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(written, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
