"""Records of an engine's steps: slices, memory, trace, log line."""

from __future__ import annotations

import time
import weakref

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.recording.accounting import DevicePeak, LiveUnits, StepMemory
from ds_terapipe.pipeline.recording.report import emit
from ds_terapipe.pipeline.recording.trace import TraceFile
from ds_terapipe.plan.files import check_writable


class Records(PipelineEngine):
    """Mixin before ``PipelineEngine``; the combined class runs the steps."""

    @property
    def _live(self) -> LiveUnits:
        live: LiveUnits = self._runtime.live
        return live

    @property
    def slices_run(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of the slices that this stage ran in the last step or evaluation, by micro-batch and in order."""
        return self._live.slices()

    @property
    def units_run(self) -> tuple[int, int]:
        """Numbers of units that this stage ran in the last step: forward, and backward (0 in an evaluation)."""
        return self._live.forward_units, self._live.backward_units

    @property
    def peak_live_units(self) -> int:
        """Largest number of live units on this stage in the last step: run forward and not yet backward."""
        return self._live.peak_units

    @property
    def peak_live_tokens(self) -> int:
        """:attr:`peak_live_units`, in tokens of a sequence."""
        return self._live.peak_tokens

    def _new_memory(self) -> StepMemory:
        return StepMemory(DevicePeak(self.device) if self.device.type == "cuda" else None)

    def _new_trace(self) -> TraceFile:
        settings = self.token_pipeline
        path = settings.trace_path
        if path is not None:
            self._consensus.decide(lambda: check_writable("token_pipeline.trace_path", path, "e.g. trace.json"))
        about = {"schedule": settings.schedule, "slices": settings.slices, "stages": self.num_stages}
        steps = None if settings.trace_steps is None else (settings.trace_steps[0], settings.trace_steps[1])
        trace = TraceFile(settings.trace_path, steps, about)
        weakref.finalize(self, trace.close)
        return trace

    def _log_step(self, batch: StepBatch, schedule: str, seconds: float) -> None:
        waited: float | None = self._watchdog.waited_s
        clock = self._runtime.links.clock
        # with streams no message blocks the host, and reading the stream's waiting time synchronizes
        if clock is not None:
            began = time.perf_counter()
            waited = clock.take_s() if self._printing() else None
            seconds += time.perf_counter() - began  # the host runs ahead of the device
        self._report.add(sum(batch.lengths) * self.micro_batch_size * self.dp_world_size, seconds, waited)
        if self._printing():
            shares = self._consensus.collect(self._report.waited_share)
            by_stage = [shares[self.grid.stage_to_global(stage)] for stage in range(self.num_stages)]
            line = self._report.line(self.global_steps, self.agg_train_loss, batch, schedule, by_stage)
            if self.global_rank == 0:
                emit(line)
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events(
                [("Train/Samples/train_loss", self.agg_train_loss.mean().item(), self.global_samples)]
            )

    def _printing(self) -> bool:
        every = self.steps_per_print()
        return every is not None and self.global_steps % every == 0
