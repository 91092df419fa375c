"""One rank of a checked launch: the question, and the answer of its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_terapipe.commands.checking.boundary import Boundary
from ds_terapipe.commands.checking.bytes import Kept
from ds_terapipe.commands.checking.stage import Counted
from ds_terapipe.plan.costs.hardware import Model

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Task:
    """A rank to check.

    Attributes:
        rank, world, per_node: of the launch; ``per_node``: processes of a node.
        stage: the one of the rank's stages whose tokens are counted.
        script: its path and arguments.
        config: DeepSpeed configuration for a script that passes none.
        length: tokens of a sequence, None where they are not known.
        before: the boundary to the stage before; None for the first one.
        signs: whether to report the signatures of all stages.
    """

    rank: int
    world: int
    per_node: int
    script: tuple[str, ...]
    config: str | None
    length: int | None
    before: Boundary | None = None
    signs: bool = False
    stage: int = 0


@dataclass(frozen=True)
class Report:
    """Layers and memory of a rank.

    Attributes:
        stage: the stage that was counted.
        places: the place of each stage.
        tensor, replicas: the launch's sizes.
        parts: the first layer of each stage, then the number of layers.
        layers: class names of this stage's layers, in order.
        parameters: of this rank.
        part: the stage in the placement.
        kept: bytes between steps.
        by_rule: whether ``kept`` was computed, not counted.
        counted: memory of tokens; None where it could not be counted.
        notes: why not.
        length, sequences, micro_batches: tokens of a sequence, sequences of a micro-batch, micro-batches of a step.
        settings, cut: the block ``token_pipeline``, whether there is one.
        weights_once: weight gradients are made once per micro-batch.
        multiple: number of tokens that every slice must be a multiple of.
        sizes: the model's; None where they are not known.
        ranks: the first rank of each place.
        last_shard: the last tensor-parallel rank of the first stage.
        signatures: of every stage, on request.
    """

    stage: int
    places: tuple[int, ...]
    tensor: int
    replicas: int
    parts: tuple[int, ...]
    layers: tuple[str, ...]
    parameters: int
    part: Any
    kept: Kept
    by_rule: bool
    counted: Counted | None
    notes: tuple[str, ...]
    length: int | None
    sequences: int
    micro_batches: int
    settings: dict[str, Any]
    cut: bool
    weights_once: bool
    sizes: Model | None
    ranks: tuple[int, ...]
    last_shard: int
    multiple: int = 1
    signatures: tuple[Signature, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return len(self.places)

    @property
    def place(self) -> int:
        """Place of the stage."""
        return self.places[self.stage]
