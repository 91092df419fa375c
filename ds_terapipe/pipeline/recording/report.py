"""Log line of every ``steps_per_print`` steps, and the monitor's events: loss, tokens/s, waiting, slices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from deepspeed.utils.logging import print_dist
from torch import Tensor

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.plan.result import quantity


def log_step(engine: Any, report: StepReport, batch: StepBatch, schedule: str, seconds: float) -> None:
    """Log a step of an engine, in steps that print, and write the loss to its monitor; collective if it prints.

    Args:
        engine: after the step.
        report: sums since the last line.
        batch, schedule: of the step.
        seconds: of the step, on this rank's host.
    """
    every = engine.steps_per_print()
    printing = every is not None and engine.global_steps % every == 0
    waited: float | None = engine._watchdog.waited_s
    waits = engine._runtime.links.waits
    # with streams no message blocks the host, and reading the stream's waiting time synchronizes
    if waits is not None:
        began = time.perf_counter()
        waited = waits.take_s() if printing else None
        seconds += time.perf_counter() - began  # the host runs ahead of the device
    report.add(sum(batch.lengths) * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size, seconds, waited)
    if printing:
        shares = engine._consensus.gather(report.waited_share)
        by_stage = [shares[engine.grid.stage_to_global(stage)] for stage in range(engine.num_stages)]
        line = report.line(engine.global_steps, engine.agg_train_loss, batch, schedule, by_stage)
        if engine.global_rank == 0:
            emit(line)
    if engine.global_rank == 0 and engine.monitor.enabled:
        engine.monitor.write_events(
            [("Train/Samples/train_loss", engine.agg_train_loss.mean().item(), engine.global_samples)]
        )


class StepReport:
    """Sums over the steps between two log lines.

    Args:
        stages: number of pipeline stages, or of places.
        word: which of them.
    """

    def __init__(self, stages: int, word: str = "stages") -> None:
        self._stages, self._word = stages, word
        self._begin()

    def _begin(self) -> None:
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._waited, self._seconds_watched = 0.0, 0.0

    def add(self, tokens: int, seconds: float, waited_s: float | None) -> None:
        """Add one step: tokens of all replicas, wall and waiting time of this rank; None: not measured."""
        self._steps += 1
        self._tokens += tokens
        self._seconds += seconds
        if waited_s is not None:
            self._waited += waited_s
            self._seconds_watched += seconds

    @property
    def waited_share(self) -> float:
        """Share of time that this stage waited for others, 0 to 1, in the measured steps since the last line."""
        return self._waited / self._seconds_watched if self._seconds_watched else 0.0

    def line(self, step: int, loss: Tensor, batch: StepBatch, schedule: str, waited: Sequence[float]) -> str:
        """Return the line, and start again. ``schedule``: of the step; ``waited``: each stage's share, in order."""
        counts = sorted({len(spans) for spans in batch.spans})
        slices = "1 slice" if counts == [1] else f"{'/'.join(map(str, counts))} slices"
        text = (
            f"step {step}: loss {float(loss):.4f}, {self._tokens / max(self._seconds, 1e-9):,.0f} tokens/s, "
            f"{self._seconds / max(self._steps, 1):.3f} s per step, waited "
            + " ".join(f"{share:.0%}" for share in waited)
            + f" ({self._word} 0 to {self._stages - 1}), {slices}, {schedule}"
        )
        self._begin()
        note = does_not_pay(self._stages, [len(spans) for spans in batch.spans])
        return f"{text}; {note}" if note else text


def does_not_pay(stages: int, slices: Sequence[int]) -> str:
    """Return a warning if micro-batches alone already fill the pipeline, else an empty string.

    The bubble of M micro-batches on K stages is (K-1)/(M+K-1) of the step; slicing can save at most that, and costs some
    per cent itself.
    """
    bubble = (stages - 1) / (len(slices) + stages - 1)
    if max(slices) == 1 or bubble > 0.08:
        return ""
    counts = f"{quantity(len(slices), 'micro-batch')}, {quantity(stages, 'stage')}"
    return f"slicing does not pay here: without it the bubble is {bubble:.0%} ({counts})"


def emit(line: str) -> None:
    """Print a line like DeepSpeed's pipeline its own: at any log level, which is "warning" by default."""
    print_dist(line, ranks=[0])
