"""The units of a step, in the orders that causal attention allows.

A slice reads the keys and values of the slices before it, so the slices of a micro-batch go forward in ascending order; its own
keys and values get gradients from the slices after it, so they go backward in descending order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action, Op, Unit


def ascending(slices: Sequence[int]) -> list[Unit]:
    """Micro-batches and their slices in ascending order.

    Raises:
        ValueError: no micro-batch, or one without slices.
    """
    if not slices or min(slices) < 1:
        raise ValueError(f"slices: got {list(slices)}, must list one positive number of slices for each micro-batch")
    return [Unit(m, i) for m, count in enumerate(slices) for i in range(count)]


def descending(slices: Sequence[int]) -> list[Unit]:
    """Micro-batches in ascending order, the slices of each in descending order, as 1F1B takes them backward."""
    return [Unit(m, i) for m, count in enumerate(slices) for i in reversed(range(count))]


def passes(op: Op, stage: int, units: Sequence[Unit]) -> list[Action]:
    """The passes of a stage over these units."""
    return [Action(op, stage, unit) for unit in units]


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """Forwards that fill the pipeline, pairs of one forward and one backward, and the backwards that are left."""
    pairs = len(forwards) - warm_up
    steady = [action for pair in zip(forwards[warm_up:], backwards[:pairs], strict=True) for action in pair]
    return [*forwards[:warm_up], *steady, *backwards[pairs:]]
