"""Predicted against measured seconds of a step: the GPT of the token pipeline benchmark in two processes.

``python -m tests.benchmarks.prediction`` measures costs as ``"slices": "auto"`` does, from recorded steps in 16, 8,
4, 2 and 1 equal slices, once in every round. With them it predicts steps in four slicings, two of which have lengths
that were never measured.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ds_terapipe.pipeline.autotune.cutting import FixedCutting
from ds_terapipe.pipeline.autotune.phases import TRIALS
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.evaluate import StepTimes
from tests.benchmarks import measure
from tests.benchmarks.measure import Result, Round, Settings
from tests.benchmarks.models import QUICK, Shape, Workload
from tests.benchmarks.token_pipeline import new_engine, token_slices

STAGES = 2


class Run(NamedTuple):
    """A step: sequences in micro-batches of one, tokens of the slices, schedule."""

    sequences: int
    slices: tuple[int, ...]
    schedule: str

    @property
    def name(self) -> str:
        lengths = f"{len(self.slices)} equal" if max(self.slices) - min(self.slices) <= 8 else "falling"
        return f"B={self.sequences}, {'unsliced' if len(self.slices) == 1 else lengths}, {self.schedule}"


def runs(sequence: int, sequences: int) -> list[Run]:
    """Unsliced, four and six equal slices, and four that fall from 1.2 to 0.8 of a quarter.

    Six slices, and the four uneven ones, have lengths and contexts that no recorded step had.
    """
    quarter = sequence // 4
    falling = tuple(quarter + (quarter // 15 // 8 * 8 or 1) * part for part in (3, 1, -1, -3))
    four, six = (tuple(slice_lengths(sequence, count)) for count in (4, 6))
    cuts = [((sequence,), "1f1b"), (four, "terapipe"), (six, "1f1b"), (falling, "1f1b")]
    return [Run(sequences, cut, schedule) for cut, schedule in cuts]


class Recorded(FixedCutting):
    """A given cutting of a step that is recorded."""

    events: Sequence[Any] = ()
    wants_events = True

    def took(self, events: Sequence[Any], seconds: float) -> None:
        self.events = events


def rounds_of(
    engine: Any, batches: Any, trials: Sequence[Run], every: Sequence[Run], steps: int, settings: Settings
) -> Any:
    """(result, recorded steps of each round on the first rank) of runs with as many sequences. For both ranks."""
    kept: list[list[RecordedStep]] = []

    def taken(run: Run, count: int, choice: FixedCutting | None = None) -> float:
        if engine.gradient_accumulation_steps() != run.sequences:
            engine.set_train_batch_size(run.sequences)
        engine._cutting = choice or FixedCutting(run.slices, run.schedule)
        return min(measure.timed(lambda: engine.train_batch(batches), count))

    def record() -> float:
        choices = [Recorded(run.slices, run.schedule) for run in trials]
        seconds = [taken(run, 1, choice) for run, choice in zip(trials, choices, strict=True)]
        found = zip(trials, choices, seconds, strict=True)
        kept.append([RecordedStep(run.slices, choice.events, one) for run, choice, one in found])
        return sum(seconds)

    for run in (*trials, *every):  # buffers, allocator and groups of each
        taken(run, 1)
    columns = {"record": record, **{run.name: partial(taken, run, steps) for run in every}}
    return measure.run_rounds(columns, settings), kept


def all_rounds(shape: Shape, batches: Sequence[int], steps: int, settings: Settings) -> list[Any]:
    """Of each number of sequences, with one engine. For both ranks."""
    engine, found = new_engine(True, STAGES, Workload(shape, 1), token_slices(max(TRIALS))), []
    cuts = [slice_lengths(shape.sequence, count) for count in TRIALS if shape.sequence // count >= 8]
    for sequences in batches:
        trials, every = [Run(sequences, cut, "1f1b") for cut in cuts], runs(shape.sequence, sequences)
        found.append(rounds_of(engine, Workload(shape, 1).endlessly(), trials, every, steps, settings))
    return found


def predict(rounds: Sequence[Round], steps: Sequence[Sequence[RecordedStep]], every: Sequence[Run]) -> dict[str, float]:
    """Seconds of each run, from the recorded steps of the rounds that count."""
    used = measure.clean_of(rounds)
    known = [step for found, one in zip(steps, rounds, strict=True) if one in used for step in found]
    # as the engine runs this model: weight gradients once for a micro-batch, the loss with each slice
    cost = measured_cost(known, STAGES, 1, weights_once=True, loss_of_whole=False, measured_on={})
    times = {run: StepTimes(cost, STAGES, run.sequences, weights_once=True) for run in every}
    return {run.name: one.seconds(run.schedule, run.slices) + overhead(known) for run, one in times.items()}


def table(result: Result, predicted: dict[str, float]) -> list[str]:
    """A line for each run, then the errors."""
    lines, errors = [f"{'':38}{'predicted s':>13}{'measured s':>13}{'error':>9}"], []
    for name, seconds in predicted.items():
        errors.append(seconds / result.seconds[name] - 1)
        lines.append(f"{name:38}{seconds:13.3f}{result.seconds[name]:13.3f}{errors[-1]:+9.1%}")
    mean, worst = statistics.mean(map(abs, errors)), max(map(abs, errors))
    return [*lines, f"error {mean:.1%} in the mean, {worst:.1%} at worst; {result.state}", ""]


def main(arguments: Sequence[str] | None = None) -> int:
    options: Any = measure.parser("prediction", __doc__, rounds=3)
    options.add_argument("--steps", type=int, default=2, help="of each run in a round (default 2)")
    options.add_argument("--batches", type=measure.numbers, default=[1, 2, 4], help="sequences (default 1,2,4)")
    options = options.parse_args(arguments)
    shape, results = QUICK if options.quick else Shape(), {}
    found = measure.on_ranks(all_rounds, shape, options.batches, options.steps, measure.settings_of(options))
    for sequences, (result, steps) in zip(options.batches, found, strict=True):
        results[f"B={sequences}"] = result
        print("\n".join(table(result, predict(result.rounds, steps, runs(shape.sequence, sequences)))), flush=True)
    measure.write_json(options.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
