"""Costs of the layers of a live pipeline: time, parameters, memory. All collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ds_terapipe.elastic.shapes.predict import LayerCosts
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.plan.costs.memory import StageMemory

_Table = NDArray[np.float64]
# Rows of a table of costs by entry; from the third on an entry has none while it is frozen.
_FORWARD, _WEIGHTS, _BACKWARD, _GRADIENTS, _ACTIVATIONS = range(5)


class _OfRank(NamedTuple):
    """Costs of a rank's entries: ``table`` [5, entries], its times 0 unless ``timed``; ``share``: see `_optimizer_share`."""

    entries: tuple[int, ...]
    timed: bool
    share: float
    table: _Table


class Costs:
    """Costs of the entries of the layer list; a frozen entry keeps those that were measured while it trained.

    Attributes:
        memory: bytes per token of this rank's stages in a timed step, if they were measured.
    """

    def __init__(self) -> None:
        self.memory: Mapping[int, StageMemory] = {}
        self._trained: dict[int, _Table] = {}  # columns of entries while they were trained

    def now(self, engine: Any) -> tuple[LayerCosts, bool]:
        """Return the costs, and whether times are seconds on all ranks; else they are proportional to parameters."""
        chunks, frozen = ModelChunks(engine.module), engine.frozen_layers
        of_ranks: list[_OfRank] = engine._consensus.gather(self._of_this_rank(engine, chunks))
        measured, table = all(each.timed for each in of_ranks), np.zeros((5, len(chunks.specs)))
        for each in of_ranks:
            table[:, each.entries] = np.maximum(table[:, each.entries], each.table)
        if not measured:  # a backward pass is twice a forward pass
            table[_FORWARD], table[_BACKWARD] = table[_WEIGHTS], 2 * table[_WEIGHTS]
        else:
            for entry in range(len(chunks.specs)):
                if entry >= frozen:
                    self._trained[entry] = table[_BACKWARD:, entry].copy()
                elif entry in self._trained:
                    table[_BACKWARD:, entry] = self._trained[entry]
                else:  # frozen since the engine was built
                    table[_BACKWARD, entry] = 2 * table[_FORWARD, entry]
        state = table[_GRADIENTS] * (1 + max(each.share for each in of_ranks))
        forward, weights, backward, gradients, activations = (tuple(row.tolist()) for row in table)
        same = tuple(chunks.prefixes.index(prefix) for prefix in chunks.prefixes)
        costs = LayerCosts(
            engine.micro_batch_size, forward, backward, weights, tuple(state.tolist()), gradients, activations, same
        )
        return costs, measured

    def _of_this_rank(self, engine: Any, chunks: ModelChunks) -> _OfRank:
        entries, here, times = chunks.entries, chunks.layers, engine._layer_times.costs()
        table = np.zeros((5, len(entries)))
        if times is not None:
            table[_FORWARD], table[_BACKWARD] = times
        for column, entry in enumerate(entries):
            parameters = [*here[chunks.prefix(entry)].parameters()] if chunks.prefix(entry) in here else []
            table[_WEIGHTS, column] = nbytes(parameters)
            table[_GRADIENTS, column] = nbytes(p for p in parameters if p.requires_grad)
        # what a micro-batch keeps between its passes, by the times of the backward passes
        kept = sum(stage.activations + stage.keys_values for stage in self.memory.values())
        spent = table[_BACKWARD] * (np.array(entries) >= engine.frozen_layers)
        if kept and spent.sum() > 0:
            table[_ACTIVATIONS] = sum(engine.slices_run[0]) * kept * spent / spent.sum()
        share = _optimizer_share(engine.module, engine.basic_optimizer)
        return _OfRank(entries, times is not None, share, table)


def _optimizer_share(module: nn.Module, optimizer: Any) -> float:
    """Return bytes of moments and masters per byte of trained weights, on this rank."""
    if optimizer is None:
        return 0.0
    here = set(map(id, module.parameters()))
    held = [value for state in optimizer.state.values() for value in state.values()]
    held += [p for group in optimizer.param_groups for p in group["params"] if id(p) not in here]
    trained = nbytes(parameter for parameter in module.parameters() if parameter.requires_grad)
    return nbytes(value for value in held if isinstance(value, Tensor)) / trained if trained else 0.0


def state_bytes(engine: Any, consensus: Consensus) -> float:
    """Return the bytes of weights, gradients and optimiser state on the fullest rank; collective."""
    parameters = list(engine.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    states = [] if engine.basic_optimizer is None else list(engine.basic_optimizer.state.values())
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return float(max(consensus.gather(nbytes((*parameters, *trained, *moments)))))


def nbytes(tensors: Iterable[Tensor]) -> float:
    """Return the bytes of tensors."""
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
