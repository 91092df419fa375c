"""Text of a pipeline's shape, for the log and the commands. Pure."""

from __future__ import annotations

from typing import Protocol


class HasShape(Protocol):
    """The numbers of a shape, see `resize.Shape`."""

    @property
    def stages(self) -> int:
        """Stages of each pipeline."""

    @property
    def replicas(self) -> int:
        """Number of pipelines."""

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch of one replica."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one replica in a step."""


def shape_text(shape: HasShape) -> str:
    """Format a shape: ``2 stages x 1 replica (4 micro-batches of 1)``."""
    counts = ((shape.stages, "stage"), (shape.replicas, "replica"))
    stages, replicas = (f"{count} {word}{'s' * (count != 1)}" for count, word in counts)
    return f"{stages} x {replicas} ({shape.micro_batches} micro-batches of {shape.micro_batch})"
