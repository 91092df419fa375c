"""Costs of the layers of a live pipeline: time, parameters, memory. All collective."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.autotune.layer_times import LayerTimes
from ds_terapipe.pipeline.transport.consensus import Consensus


def trained_sizes(module: PipelineModule, consensus: Consensus) -> list[int]:
    """Return the trained parameters of every entry of the layer list; a tied layer counts with its first entry."""
    chunks = ModelChunks(module)
    prefixes, here = chunks.prefixes, chunks.layers
    first = {prefix: entry for entry, prefix in reversed([*enumerate(prefixes)])}
    mine = {first[prefix]: sum(p.numel() for p in here[prefix].parameters() if p.requires_grad) for prefix in here}
    sizes = [0 for _ in prefixes]
    for of_rank in consensus.gather(mine):
        for entry, size in of_rank.items():
            sizes[entry] = max(sizes[entry], size)
    return sizes


class Costs:
    """Costs of the entries of the layer list; frozen entries keep the backward time measured while they trained."""

    def __init__(self) -> None:
        self._backward: dict[int, float] = {}  # seconds, as measured last

    def now(self, engine: Any, consensus: Consensus, times: LayerTimes) -> tuple[list[float], list[float], bool]:
        """Return forward and backward costs of every entry, and whether they are seconds; collective.

        They are seconds if all ranks measured them, else proportional to parameters.
        """
        chunks = ModelChunks(engine.module)
        everybodys = consensus.gather((chunks.entries.start, times.costs(), _by_parameters(chunks)))
        measured = all(costs is not None for _, costs, _ in everybodys)
        forward, backward = ([0.0] * len(chunks.specs) for _ in range(2))
        for first, costs, sizes in everybodys:
            for entry, (ahead, back) in enumerate(zip(*(costs if measured else sizes), strict=True), start=first):
                forward[entry], backward[entry] = max(forward[entry], ahead), max(backward[entry], back)
        if measured:
            for entry in range(len(backward)):
                if entry >= engine.frozen_layers:
                    self._backward[entry] = backward[entry]
                else:
                    backward[entry] = self._backward.get(entry, 2 * forward[entry])  # frozen since the engine was built
        return forward, backward, measured


def _by_parameters(chunks: ModelChunks) -> tuple[list[float], list[float]]:
    """Return costs by parameters, in place of times: a backward pass is twice a forward pass."""
    here = chunks.layers
    layers = [here.get(chunks.prefix(entry)) for entry in chunks.entries]
    sizes = [0.0 if layer is None else float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    return sizes, [2 * size for size in sizes]


def state_bytes(engine: Any, consensus: Consensus) -> float:
    """Return the bytes of weights, gradients and optimiser state on the fullest rank; collective."""
    parameters = list(engine.module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    states = [] if engine.basic_optimizer is None else list(engine.basic_optimizer.state.values())
    moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    mine = sum(float(tensor.numel() * tensor.element_size()) for tensor in (*parameters, *trained, *moments))
    return max(consensus.collect(mine))
