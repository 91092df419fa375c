"""Memory limit: memory that is measured in one step on all stages, the limit of a step, and what steps of any slices take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.pipeline.autotune.run_info import Agreement, RunInfo
from ds_terapipe.pipeline.recording.accounting import StepMemory, gradients_to_come
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.plan.costs.cost import MeasuredCost
from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryModel, Peaks, StageMemory, calibrated, memory_use


class StepMeter:
    """Meter of an engine's steps.

    Args:
        engine: the engine.
        consensus: brings the stages' memory to all ranks.
        memory: memory of this rank's steps.
    """

    def __init__(self, engine: Any, consensus: Consensus, memory: StepMemory) -> None:
        self._engine, self._consensus, self._memory = engine, consensus, memory

    def watch(self, counts: bool) -> None:
        """Watch the peak of the next step, and measure its memory if it ``counts``."""
        if counts:
            self._memory.begin(self._engine.module.parameters())
        self._memory.note_peak(self._engine.module.parameters())

    def end(self) -> tuple[MemoryModel, float | None]:
        """Return the memory model of all stages and the free bytes of a stage, None without limit; collective.

        Each stage is that of its fullest replica and tensor-parallel rank.
        """
        said = self._consensus.gather((self._memory.end(), self._free()))
        stages: dict[int, StageMemory] = {}
        for stage, taken in (each for of_rank, _ in said for each in of_rank.items()):
            if stage not in stages or taken.activations > stages[stage].activations:
                stages[stage] = taken
        limits = [free for _, free in said if free is not None]
        model = MemoryModel(tuple(stages[stage] for stage in sorted(stages)))
        return model, min(limits) if limits else None

    def peaks(self) -> tuple[float, ...] | None:
        """Return the peak bytes of every place in the watched step, from its fullest rank; None if unknown; collective."""
        if self._engine.device.type == "cpu":  # on all ranks
            return None
        peaks: dict[int, float] = {}
        for place, taken in self._consensus.gather((self._engine.stage_id, self._memory.taken)):
            peaks[place] = max(peaks.get(place, 0.0), taken or 0.0)
        return tuple(peaks[place] for place in sorted(peaks))

    def _free(self) -> float | None:
        """Return the bytes that are free for activations and buffers; None if unknown.

        They include PyTorch's cache, and leave room for gradients. Weights and optimiser are allocated by then.
        """
        device = self._engine.device
        if device.type != "cuda":
            return None
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        to_come = gradients_to_come(self._engine.module.parameters())
        return float(torch.cuda.mem_get_info(device)[0] + kept - to_come)


class MemoryLimit:
    """The memory model: counted in one step, refined by the peaks of later steps.

    Args:
        config: the block ``token_pipeline``.
        run: facts of the run.
        schedule: schedule of all measured steps.
        agree: brings rank 0's decisions to all ranks.
        meter: measures the memory of a step.
    """

    def __init__(
        self, config: TokenPipelineConfig, run: RunInfo, schedule: str, agree: Agreement, meter: StepMeter
    ) -> None:
        self._run, self._schedule, self._agree, self.meter = run, schedule, agree, meter
        self._given_gb = config.memory_gb
        self._counted: MemoryModel | None = None  # without refinement by peaks
        self._peaks: dict[tuple[int, ...], Peaks] = {}  # by slices
        self._limit: float | None = None
        self._limit_from: str | None = None  # the file that it was read from
        self.model: MemoryModel | None = None

    def count(self) -> None:
        """Take the model and the limit from the measured step; collective."""
        self._counted, self._limit = self.meter.end()
        self.model, self._limit_from = self._counted, None
        self._peaks.clear()

    def learn(self, shape: tuple[int, int], slices: int | Sequence[int]) -> None:
        """Refine the model by the peak of the step that has ended, cut into ``slices``; collective."""
        taken, counted = self.meter.peaks(), self._counted
        if taken is None or counted is None:
            return
        longest, micro_batches = shape
        lengths = self._run.lengths(longest, slices)
        self._peaks[lengths] = Peaks(lengths, taken)  # a trial replaces the warm-up, in which the model was inspected
        once, placement, peaks = self._run.weights_once, self._run.placement, [*self._peaks.values()]
        # decided by one rank: others' results may differ in a last digit, and their trials with them
        self.model = self._agree(lambda: calibrated(counted, peaks, self._schedule, micro_batches, once, placement))

    def load(self, cost: MeasuredCost, path: str) -> None:
        """Load the memory model and limit of a file of measurements."""
        self.model, self._limit, self._limit_from = cost.memory, cost.memory_limit, path

    @property
    def free_bytes(self) -> float | None:
        """Free bytes at the measurement; None if the configuration sets the limit, or nothing limits a plan."""
        return self._limit if self._given_gb is None else None

    @property
    def limit_gb(self) -> float | None:
        """Memory limit of a plan in 1e9 bytes: the configuration's, else the bytes that were free."""
        given = self._given_gb
        return self._limit / GIGABYTE if given is None and self._limit is not None else given

    @property
    def limit_name(self) -> str:
        """Source of the limit, for errors."""
        if self._given_gb is None and self._limit_from is not None:
            return f"{self._limit_from}: measured_on.memory_limit_bytes, in GB"
        return "token_pipeline.memory_gb"

    def needed(self, lengths: Sequence[int], micro_batches: int) -> float:
        """Return the bytes that a step of such slices takes on the fullest stage; 0 if unknown."""
        if self.model is None:
            return 0.0
        uses = memory_use(
            self.model, self._schedule, lengths, micro_batches, self._run.weights_once, self._run.placement
        )
        return max(use.total for use in uses)

    def fits(self, lengths: Sequence[int], micro_batches: int) -> bool:
        """Whether such a step fits into the limit; an uncut one may not."""
        limit = self.limit_gb
        return limit is None or self.needed(lengths, micro_batches) <= limit * GIGABYTE
