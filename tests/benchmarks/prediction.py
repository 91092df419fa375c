"""Predicted against measured seconds of a step: the GPT of the token pipeline benchmark in two processes.

``python -m tests.benchmarks.prediction`` measures costs as ``"slices": "auto"`` does, from recorded steps in 16, 8,
4, 2 and 1 equal slices, once in every round. With them it predicts steps in four slicings, two of which have lengths
that were never measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from ds_terapipe.pipeline.autotune.slice_plan import FixedSlices, SlicePlan
from ds_terapipe.pipeline.autotune.trials import TRIALS
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.plan.costs.measure import RecordedStep, measured_cost, overhead
from ds_terapipe.plan.evaluate import StepTimes
from tests.benchmarks import measure
from tests.benchmarks.measure import Result, Settings
from tests.benchmarks.models import QUICK, Shape, Workload
from tests.benchmarks.token_pipeline import new_engine, token_slices

STAGES = 2
Cut = tuple[tuple[int, ...], str]


def cuts_of(sequence: int) -> dict[str, Cut]:
    """Unsliced, four and six equal slices, and four that fall from 1.2 to 0.8 of a quarter, each with a schedule.

    Six slices, and the four uneven ones, have lengths and contexts that no recorded step had.
    """
    quarter = sequence // 4
    falling = tuple(quarter + (quarter // 15 // 8 * 8 or 1) * part for part in (3, 1, -1, -3))
    four, six = (tuple(slice_lengths(sequence, count)) for count in (4, 6))
    equal = {"unsliced": ((sequence,), "1f1b"), "4 equal": (four, "terapipe"), "6 equal": (six, "1f1b")}
    return {**equal, "falling": (falling, "1f1b")}


class Recorded(FixedSlices):
    """A given slice plan of a step that is recorded."""

    events: Sequence[Any] = ()

    def plan(self, lengths: Sequence[int], everywhere: Sequence[int]) -> SlicePlan:
        return super().plan(lengths, everywhere)._replace(recorded=True)

    def record_step(self, events: Sequence[Any], seconds: float) -> None:
        self.events = events


def measured(workload: Workload, steps: int, settings: Settings) -> tuple[Result, list[list[RecordedStep]]]:
    """The result, and the recorded steps of each round on the first rank. For both ranks."""
    engine, batches = new_engine(True, STAGES, workload, token_slices(max(TRIALS))), workload.endlessly()
    sequence, kept = workload.shape.sequence, list[list[RecordedStep]]()
    trials = [(slice_lengths(sequence, count), "1f1b") for count in TRIALS if sequence // count >= 8]

    def taken(choice: FixedSlices, count: int) -> float:
        engine._slicer = choice
        return min(measure.timed(lambda: engine.train_batch(batches), count))

    def record() -> float:
        choices = [Recorded(*cut) for cut in trials]
        seconds = [taken(choice, 1) for choice in choices]
        found = zip(trials, choices, seconds, strict=True)
        kept.append([RecordedStep(cut[0], choice.events, one) for cut, choice, one in found])
        return sum(seconds)

    cuts = {name: FixedSlices(*cut) for name, cut in cuts_of(sequence).items()}
    for choice in (*(FixedSlices(*cut) for cut in trials), *cuts.values()):  # buffers, allocator and groups of each
        taken(choice, 1)
    columns = {name: partial(taken, choice, steps) for name, choice in cuts.items()}
    return measure.run_rounds({"record": record, **columns}, settings), kept


def table(workload: Workload, result: Result, steps: Sequence[Sequence[RecordedStep]]) -> list[str]:
    """A line for each cut, as the recorded steps of the rounds that count predict it, then the errors."""
    known = [step for found, one in zip(steps, result.rounds, strict=True) if one in result.counted for step in found]
    # as the engine runs this model: weight gradients once for a micro-batch, the loss with each slice
    cost = measured_cost(known, STAGES, 1, weights_once=True, loss_of_whole=False, measured_on={})
    times = StepTimes(cost, STAGES, workload.sequences, weights_once=True)
    lines, errors = [f"B={workload.sequences:<36}{'predicted s':>13}{'measured s':>13}{'error':>9}"], []
    for name, (lengths, schedule) in cuts_of(workload.shape.sequence).items():
        predicted, seconds = times.seconds(schedule, lengths) + overhead(known), result.seconds[name]
        errors.append(predicted / seconds - 1)
        lines.append(f"{f'{name}, {schedule}':38}{predicted:13.3f}{seconds:13.3f}{errors[-1]:+9.1%}")
    mean, worst = statistics.mean(map(abs, errors)), max(map(abs, errors))
    return [*lines, f"error {mean:.1%} in the mean, {worst:.1%} at worst; {result.state}"]


def main() -> None:
    options: Any = measure.parser("prediction", __doc__, rounds=3)
    options.add_argument("--steps", type=int, default=2, help="of each cut in a round (default 2)")
    options.add_argument("--batches", type=measure.listed(int), default=[1, 2, 4], help="sequences (default 1,2,4)")
    options = options.parse_args()
    report = measure.Report(options)
    for sequences in options.batches:
        workload = Workload(QUICK if options.quick else Shape(), sequences)
        result, steps = measure.on_ranks(measured, workload, options.steps, measure.settings_of(options))
        report.add(f"B={sequences}", result, table(workload, result, steps))


if __name__ == "__main__":
    main()
