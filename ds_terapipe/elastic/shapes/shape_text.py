"""A shape of the pipeline in words, the same in the log and in what the commands print. Pure."""

from __future__ import annotations

from typing import Protocol


class HasShape(Protocol):
    """The numbers of a shape, see `resize.Shape`."""

    @property
    def stages(self) -> int:
        """Of each pipeline."""

    @property
    def replicas(self) -> int:
        """Pipelines."""

    @property
    def micro_batch(self) -> int:
        """Samples in a micro-batch of one replica."""

    @property
    def micro_batches(self) -> int:
        """Of one replica in a step."""


def shape_text(shape: HasShape) -> str:
    """``2 stages x 1 replica (4 micro-batches of 1)``."""
    counts = ((shape.stages, "stage"), (shape.replicas, "replica"))
    stages, replicas = (f"{count} {word}{'s' * (count != 1)}" for count, word in counts)
    return f"{stages} x {replicas} ({shape.micro_batches} micro-batches of {shape.micro_batch})"
