"""Schedule of a step, made and validated once per shape of a step."""

from __future__ import annotations

from functools import lru_cache

from ds_terapipe.schedule import Action, Placement, forward_only, order, validate, with_messages, with_weight_gradients

FORWARD_ONLY = "forward_only"


@lru_cache(maxsize=32)
def grid_of_step(
    name: str, placement: Placement, slices: tuple[int, ...], deferring: tuple[int, ...] = ()
) -> tuple[tuple[Action, ...], ...]:
    """Return the validated grid of schedule ``name`` (or ``forward_only``), ``slices[m]`` slices of micro-batch m.

    ``deferring``: the stages whose weight gradients are separate actions, once per micro-batch. Returns one row of
    actions per place, sends and receives included.
    """
    computed = forward_only(placement, slices) if name == FORWARD_ONLY else order(name, placement, slices)
    apart = deferring if max(slices) > 1 else ()
    grid = with_weight_gradients(with_messages(computed, placement), placement, apart)
    validate(grid, slices, name, placement)
    return tuple(tuple(row) for row in grid)
