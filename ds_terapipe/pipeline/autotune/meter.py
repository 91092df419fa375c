"""Memory of one step on all stages, counted and at its peak."""

from __future__ import annotations

from typing import Any

import torch

from ds_terapipe.pipeline.recording.accounting import StepMemory, gradients_to_come
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryModel, StageMemory


class StepMeter:
    """Meter of an engine's steps.

    Args:
        engine: the engine.
        consensus: brings the stages' memory to all ranks.
        memory: memory of this rank's steps.
    """

    def __init__(self, engine: Any, consensus: Consensus, memory: StepMemory) -> None:
        self._engine, self._consensus, self._memory = engine, consensus, memory

    def begin(self) -> None:
        """Count the next step."""
        self._memory.begin(self._engine.module.parameters())

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

    def note_peak(self) -> None:
        """Watch the peak of the next step."""
        self._memory.note_peak(self._engine.module.parameters())

    def peaks(self) -> tuple[float, ...] | None:
        """Return the peak bytes of every place in the watched step, from its fullest rank; None if unknown; collective."""
        if self._engine.device.type == "cpu":  # on all ranks
            return None
        peaks: dict[int, float] = {}
        for place, taken in self._consensus.gather((self._engine.stage_id, self._memory.taken)):
            peaks[place] = max(peaks.get(place, 0.0), taken or 0.0)
        return tuple(peaks[place] for place in sorted(peaks))

    def _free(self) -> float | None:
        """Return the bytes for activations and buffers: the configured ones, else the free ones; None if unknown.

        Free bytes include PyTorch's cache, and leave room for gradients. Weights and optimiser are allocated by then.
        """
        given = self._engine.token_pipeline.memory_gb
        if given is not None:
            return float(given * GIGABYTE)
        device = self._engine.device
        if device.type != "cuda":
            return None
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        to_come = gradients_to_come(self._engine.module.parameters())
        return float(torch.cuda.mem_get_info(device)[0] + kept - to_come)
