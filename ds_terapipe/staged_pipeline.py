"""A ``PipelineModule`` of Transformer layers whose stages are given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_terapipe.errors import ConfigError
from ds_terapipe.job import Job
from ds_terapipe.pipeline.token_shares import applied_to_parts
from ds_terapipe.plan.stages import even


class StagedPipeline(PipelineModule):
    """A ``PipelineModule`` whose stages are given, not searched for.

    Args:
        layers: specs of all layers. Those before the first and after the last Transformer layer belong to the first and the
            last stage, ``layers_around`` says how many they are.
        layers_per_stage: Transformer layers of each stage; None: even, earlier stages first.
        topology: the layout.
        arguments: further ones of ``PipelineModule``.

    Raises:
        ConfigError: ``layers_per_stage`` are not positive numbers, one for each stage, that add up to all Transformer layers.
    """

    layer_class: type  # of the Transformer layers, which are what activation checkpoints are made of

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layers_per_stage: Sequence[int] | None,
        topology: ProcessTopology,
        **arguments: Any,
    ) -> None:
        kinds = [spec.typename is self.layer_class for spec in layers]
        before = kinds.index(True) if any(kinds) else 0
        self.layers_around = before, len(layers) - before - sum(kinds)
        stages = max(1, topology.get_dim("pipe"))
        self._boundaries = stage_boundaries(sum(kinds), stages, layers_per_stage, self.layers_around)
        super().__init__(layers, topology=topology, checkpointable_layers=[self.layer_class.__name__], **arguments)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Present number of Transformer layers of each stage; ``elastic_pipeline`` moves them, and may leave 0."""
        before, after = self.layers_around
        first, end = before, self._num_layers - after
        return tuple(max(0, min(stop, end) - max(start, first)) for start, stop in pairwise(self.parts))

    @property
    def idle_stages(self) -> list[int]:
        """Stages of which nothing is trained; collective."""
        trains = self.stage_id, any(parameter.requires_grad for parameter in self.parameters())
        return sorted({stage for stage, some in Job.current().gather(trains) if not some})

    def check_without_keys(self) -> None:
        """Refuse what DeepSpeed's own engine would run the pipeline wrongly with; collective.

        Raises:
            ConfigError: on every rank. Gradients of weights that tensor-parallel ranks apply to parts are not summed there. On an
                idle stage beside others 0.19.8 fails, in the optimizer, its wrapper or clipping.
        """
        if any(Job.current().gather(bool(applied_to_parts(self)))):
            raise ConfigError(
                "token_pipeline: got none with sequence_parallel or qk_layernorm, must be there (DeepSpeed's own engine does not "
                'sum the gradients of norms over tensor-parallel ranks), use "token_pipeline": {"slices": 1}'
            )
        idle = self.idle_stages
        if idle and len(idle) < self.num_stages:
            raise ConfigError(
                f"token_pipeline: got none with nothing trained on stage {', '.join(map(str, idle))}, must be there (DeepSpeed's "
                'own engine fails on such a stage), use "token_pipeline": {"slices": 1}'
            )

    def even_parts(self, stages: int) -> list[int]:
        """Return the first layer of each of so many even stages, then the number of layers."""
        before, after = self.layers_around
        return stage_boundaries(self._num_layers - before - after, stages, None, self.layers_around)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._boundaries
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def stage_boundaries(
    num_layers: int, stages: int, layers_per_stage: Sequence[int] | None, around: tuple[int, int]
) -> list[int]:
    """Return the first layer of each stage, then the number of layers; ``around``: layers at both ends.

    Raises:
        ConfigError: ``layers_per_stage`` are not positive numbers, one for each stage, that add up to ``num_layers``.
    """
    if layers_per_stage is None:
        layers_per_stage = even(num_layers, stages)
    counts = list(layers_per_stage)
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            f"layers per stage: got {counts} for {num_layers} layers, must be {stages} positive numbers that add up to "
            f"{num_layers}, use at most {num_layers} stages"
        )
    counts[0] += around[0]
    counts[-1] += around[1]
    return [0, *accumulate(counts)]
