"""What the planner says a step takes against what it takes: the GPT of the token pipeline benchmark in two processes.

``python -m tests.benchmarks.prediction`` measures costs as ``"slices": "auto"`` does, from recorded steps of 1, 2 or 4
sequences in 16, 8, 4, 2 and 1 equal slices, once in every round, and with them predicts steps of as many sequences in four
slicings, two of which have lengths that were never measured. Costs and steps are taken in the same rounds,
tests/benchmarks/rounds.py says how. ``--quick`` runs a tiny model through all of it and shows that the benchmark works, not how
good the planner is.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from ds_terapipe.pipeline.autotune.cutting import FixedCutting
from ds_terapipe.pipeline.autotune.phases import TRIALS
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.tracing.chrome import Event
from tests.benchmarks import gpt
from tests.benchmarks.columns import Workload, token_slice_engine
from tests.benchmarks.rounds import CLEAN_ROUNDS_NEEDED, PATIENCE, Round, minima, probe, run_rounds
from tests.benchmarks.workers import Seat, Workers

STAGES = 2
MEAN_ERROR, WORST_ERROR = 0.05, 0.12


class Run(NamedTuple):
    """A step: sequences in micro-batches of one, tokens of the slices, schedule."""

    sequences: int
    slices: tuple[int, ...]
    schedule: str

    @property
    def name(self) -> str:
        """As a table has it."""
        lengths = f"{len(self.slices)} equal" if max(self.slices) - min(self.slices) <= 8 else "falling"
        return f"B={self.sequences}, {'unsliced' if len(self.slices) == 1 else lengths}, {self.schedule}"


@dataclass(frozen=True)
class Compared:
    """Seconds of a step, as predicted and as taken."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1


def runs(sequence: int, batches: Sequence[int]) -> list[Run]:
    """Unsliced, four and six equal slices, and four that fall from 1.2 to 0.8 of a quarter, under both schedules in turn.

    Six slices, and the four uneven ones, have lengths and contexts that no recorded step had.
    """
    quarter = sequence // 4
    step = quarter // 15 // 8 * 8 or 1
    falling = tuple(quarter + step * part for part in (3, 1, -1, -3))
    cuts = [(sequence,), slice_lengths(sequence, 4), slice_lengths(sequence, 6), falling]
    schedules = ("1f1b", "terapipe", "1f1b", "1f1b")
    return [Run(b, tuple(cut), schedule) for b in batches for cut, schedule in zip(cuts, schedules, strict=True)]


class Recorded(FixedCutting):
    """A given cutting of a step that is recorded."""

    events: Sequence[Event] = ()
    wants_events = True

    def took(self, events: Sequence[Event], seconds: float) -> None:
        """What the step took."""
        self.events = events


def prepare(seat: Seat, shape: gpt.Shape) -> None:
    """Request: build the engine in this worker."""
    workload = Workload(shape, 1)
    engine, batches = token_slice_engine(seat.world, workload, slices=max(TRIALS)), workload.endlessly()

    def step(run: Run, recorded: bool) -> tuple[float, Sequence[Event]]:
        if engine.gradient_accumulation_steps() != run.sequences:
            engine.set_train_batch_size(run.sequences)
        engine._cutting = choice = (Recorded if recorded else FixedCutting)(run.slices, run.schedule)
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(batches)
        return time.perf_counter() - start, getattr(choice, "events", ())

    seat.step = step


def stepped(seat: Seat, run: Run, recorded: bool) -> tuple[float, Sequence[Event]]:
    """Request: (seconds, events of all ranks on rank 0) of one step."""
    return seat.step(run, recorded)


def timed(workers: Workers, run: Run, repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` steps, a step being as long as on its slowest rank."""
    with workers.awake():
        steps = [workers.call(stepped, run, False) for _ in range(repeats)]
    return min(max(seconds for seconds, _ in ranks) for ranks in steps)


def recorded(workers: Workers, trials: Sequence[Run]) -> list[RecordedStep]:
    """The steps that costs are made from."""
    found = []
    with workers.awake():
        for run in trials:
            ranks = workers.call(stepped, run, True)
            found.append(RecordedStep(run.slices, ranks[0][1], max(seconds for seconds, _ in ranks)))
    return found


def compare(
    rounds: Sequence[Round], steps: Sequence[Sequence[RecordedStep]], every: Sequence[Run]
) -> tuple[list[Compared], int]:
    """Predictions from the recorded steps of the clean rounds (of all, without one) against their minima."""
    figures = minima(rounds)
    used = [one for one, round_ in zip(steps, rounds, strict=True) if round_.clean or not figures.clean]
    known = [step for one in used for step in one]
    # as the engine runs this model: weight gradients once for a micro-batch, the loss with each slice
    cost = measured_cost(known, STAGES, 1, weights_once=True, loss_of_whole=False, measured_on={})
    outside = overhead(known)
    found = []
    for run in every:
        times = StepTimes(cost, STAGES, run.sequences, weights_once=True)
        found.append(Compared(run.name, times.seconds(run.schedule, run.slices) + outside, figures.seconds[run.name]))
    return found, figures.clean


def table(found: Sequence[Compared], clean: int, tried: int) -> list[str]:
    """A line per run, then the errors."""
    lines = [f"{'':<34}{'predicted s':>12}{'measured s':>12}{'error':>8}"]
    lines += [f"{one.name:<34}{one.predicted_s:>12.3f}{one.measured_s:>12.3f}{one.error:>+8.1%}" for one in found]
    mean, worst = statistics.mean(abs(one.error) for one in found), max(abs(one.error) for one in found)
    good = mean <= MEAN_ERROR and worst <= WORST_ERROR
    state = "inconclusive" if clean < CLEAN_ROUNDS_NEEDED else "pass" if good else "miss"
    lines.append(
        f"{clean} clean rounds of {tried}; error {mean:.1%} on average (at most {MEAN_ERROR:.0%} wanted), {worst:.1%} at "
        f"worst ({WORST_ERROR:.0%}): {state}"
    )
    return lines


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[int, tuple[list[Compared], list[Round]]]:
    """For each number of sequences rounds of recorded and of plain steps: short ones, for the machine's speed drifts."""
    shape = gpt.QUICK if options.quick else gpt.Shape()
    cuts = [slice_lengths(shape.sequence, count) for count in TRIALS if shape.sequence // count >= 8]
    results = {}
    with Workers(STAGES, ("deepspeed", "ds_terapipe"), options.log, options.timeout) as workers:
        workers.call(prepare, shape)
        for batch in options.batches:
            say(f"B={batch}")
            trials = [Run(batch, cut, "1f1b") for cut in cuts]
            results[batch] = _measure_batch(workers, trials, runs(shape.sequence, [batch]), options, say)
    return results


def _measure_batch(
    workers: Workers,
    trials: Sequence[Run],
    every: Sequence[Run],
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> tuple[list[Compared], list[Round]]:
    steps: list[list[RecordedStep]] = []
    with workers.awake():
        for run in (*trials, *every):  # buffers, allocator and groups of each
            workers.call(stepped, run, False)

    def record() -> float:
        steps.append(recorded(workers, trials))
        return 0.0

    columns: Mapping[str, Callable[[], float]] = {
        "record": record,
        **{run.name: lambda run=run: timed(workers, run, options.steps) for run in every},
    }

    def probed() -> Any:
        with workers.awake():
            return probe(workers, 2 if options.quick else 16)

    patience = 0 if options.quick else PATIENCE
    rounds = run_rounds(columns, probed, options.rounds, options.attempts, say, patience)
    found, clean = compare(rounds, steps, every)
    print("\n".join(["", *table(found, clean, len(rounds))]), flush=True)
    return found, rounds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.prediction", description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="clean rounds wanted per batch (default 3)")
    parser.add_argument("--attempts", type=int, default=9, help="rounds tried at most per batch (default 9)")
    parser.add_argument("--steps", type=int, default=2, help="steps of each run in a round (default 2)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4], help="sequences (default 1 2 4)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there")
    parser.add_argument("--log", metavar="FILE", default=os.devnull, help="the workers' own output (default: nowhere)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for a worker (default 300)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does the benchmark work?")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    results = measure(options, logging.getLogger(__name__).info)
    every = [one for found, _ in results.values() for one in found]
    clean = min(sum(one.clean for one in rounds) for _, rounds in results.values())
    tried = max(len(rounds) for _, rounds in results.values())
    print("\nAll of them: " + table(every, clean, tried)[-1])
    if options.json:
        with open(options.json, "w") as file:
            kept = {
                batch: {"runs": [asdict(one) for one in found], "rounds": [asdict(one) for one in rounds]}
                for batch, (found, rounds) in results.items()
            }
            json.dump(kept, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
