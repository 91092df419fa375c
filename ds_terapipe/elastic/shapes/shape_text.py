"""Text of a pipeline's shape, for the log and the commands. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_terapipe.elastic.policies.resize import Shape
    from ds_terapipe.elastic.shapes.history import StepShape


def shape_text(shape: Shape | StepShape, several: bool = False) -> str:
    """Format a shape: ``2 stages x 1 replica (4 micro-batches of 1)``; ``several``: stages on a place."""
    word = "place" if several or getattr(shape, "places", None) else "stage"
    counts = ((shape.stages, word), (shape.replicas, "replica"))
    stages, replicas = (f"{count} {word}{'s' * (count != 1)}" for count, word in counts)
    return f"{stages} x {replicas} ({shape.micro_batches} micro-batches of {shape.micro_batch})"
