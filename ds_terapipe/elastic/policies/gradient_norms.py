"""Root-mean-square gradient of each layer, averaged over the steps of an interval, for the policy ``grad_norm``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from ds_terapipe.clipping import square_sum
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.parameter_marks import is_counted
from ds_terapipe.pipeline.transport.consensus import Consensus


class GradientNorms:
    """Accumulates the norms of reduced gradients before clipping, by entry of the layer list.

    Nothing is read from the device before `take`. A tied weight counts with the first stage that has it.

    Args:
        entries: number of entries of the layer list.
        device: device of the gradients.
        wanted: whether the policy needs norms; else all methods do nothing.
    """

    def __init__(self, entries: int, device: torch.device, wanted: bool) -> None:
        self._entries, self._device, self._wanted = entries, device, wanted
        self._totals: dict[int, Any] = {}
        self._steps: dict[int, int] = {}

    def add(self, engine: Any) -> None:
        """Add the gradients of a step; collective over the tensor-parallel ranks."""
        if not self._wanted:
            return
        chunks, grid = ModelChunks(engine.module), engine.grid
        layers, tensor_rank = chunks.layers, grid.get_slice_parallel_rank()
        table = torch.zeros(len(layers), 2, dtype=torch.float64, device=self._device)
        for row, layer in enumerate(layers.values()):
            for parameter in layer.parameters():
                if parameter.grad is not None and parameter.requires_grad and is_counted(parameter, tensor_rank):
                    table[row, 0] += square_sum(parameter.grad)
                    table[row, 1] += parameter.numel()
        if grid.model_parallel_size > 1:
            torch.distributed.all_reduce(table, group=grid.slice_proc_group)
        roots = (table[:, 0] / table[:, 1].clamp(min=1)).sqrt()
        first = {chunks.prefix(entry): entry for entry in reversed(chunks.entries)}
        for row, prefix in enumerate(layers):
            entry = first[prefix]
            self._totals[entry] = self._totals.get(entry, 0.0) + roots[row]
            self._steps[entry] = self._steps.get(entry, 0) + 1

    def take(self, consensus: Consensus) -> Sequence[float]:
        """Return the averages since the last call, nan for entries without a gradient; collective."""
        means = {entry: total / steps for entry, steps, total in self.state(consensus) or () if total}
        self._totals, self._steps = {}, {}
        return [means.get(entry, math.nan) for entry in range(self._entries)]

    def state(self, consensus: Consensus) -> list[tuple[int, int, float]] | None:
        """Return (entry, steps, sum over the steps) for a checkpoint, None if the policy needs no norms; collective."""
        if not self._wanted:
            return None
        mine = {entry: (self._steps[entry], float(total)) for entry, total in self._totals.items()}
        most: dict[int, tuple[int, float]] = {}  # for a layer that has moved, the rank with the most steps counts
        for of_rank in consensus.gather(mine):
            for entry, found in of_rank.items():
                most[entry] = max(most.get(entry, found), found)
        return [(entry, *found) for entry, found in sorted(most.items())]

    def load(self, state: Sequence[tuple[int, int, float]] | None) -> None:
        """Restore the result of `state`, on every rank."""
        self._steps = {entry: steps for entry, steps, _ in state or ()}
        self._totals = {entry: total for entry, _, total in state or ()}
