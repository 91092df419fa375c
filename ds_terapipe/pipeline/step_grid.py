"""Schedule of a step, made and validated once per shape of a step."""

from __future__ import annotations

from functools import lru_cache

from ds_terapipe.pipeline.autotune.slice_plan import DEFAULT_SCHEDULE
from ds_terapipe.schedule import (
    Action,
    Placement,
    Schedule,
    ScheduleError,
    complete,
    order,
    validate,
    with_weight_gradients,
)

FORWARD_ONLY = "forward_only"


@lru_cache(maxsize=32)
def grid_of_step(
    schedule: str | Schedule, placement: Placement, slices: tuple[int, ...], deferring: tuple[int, ...] = ()
) -> tuple[tuple[Action, ...], ...]:
    """Return the validated grid of a schedule (or ``forward_only``), ``slices[m]`` slices of micro-batch m.

    ``deferring``: the stages whose weight gradients are separate actions, once per micro-batch. Returns one row of
    actions per place, sends and receives included.
    """
    apart = deferring if max(slices) > 1 else ()
    grid = with_weight_gradients(complete(order(schedule, placement, slices), placement), placement, apart)
    try:
        validate(grid, slices, schedule, placement)
    except ScheduleError:
        if isinstance(schedule, str):
            raise
        # its messages lock up without slices that are left out, which are padding
        return grid_of_step(DEFAULT_SCHEDULE, placement, slices, deferring)
    return tuple(tuple(row) for row in grid)
