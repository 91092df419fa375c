"""Orders as text: a line for each place, its actions as they print, ``0F0.0 0F0.1 0B0.1 0B0.0 0W0.0``.

Such an order may have been found by a search, and it may have been edited. It has computations, or all messages too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from .actions import Action, Grid, Op
from .orders.registry import Schedule, held_by
from .placement import Placement
from .validate import ScheduleError, validate

SEARCHED = "searched"
"""Name of a schedule whose order is data."""

Text = tuple[str, ...]


def text_of(grid: Grid) -> Text:
    """Return an order as text."""
    return tuple(" ".join(map(str, row)) for row in grid)


def grid_from(text: Sequence[str]) -> list[list[Action]]:
    """Return the order of a text: the inverse of `text_of`.

    Raises:
        ValueError: in one line, the place and the word that is no action.
    """
    grid: list[list[Action]] = []
    for place, line in enumerate(text):
        grid.append([])
        for word in line.split():
            try:
                grid[-1].append(Action.from_text(word))
            except ValueError as error:
                raise ValueError(f"place {place}: {error}") from error
    return grid


def check_text(text: Sequence[str], placement: Placement, slices: Sequence[int]) -> None:
    """Raise ValueError, in one line with the place and the action, unless an order trains on a placement."""
    grid = grid_from(text)
    if len(grid) != placement.places:
        raise ValueError(f"got {len(grid)} lines, must be one for each of {placement.places} places")
    if not any(action.op is Op.BACKWARD for row in grid for action in row):
        raise ValueError("got no backward pass, must be an order that trains")
    try:
        validate(grid, slices, None, placement)
    except ScheduleError as error:
        raise ValueError(f"{error.at}: {str(error).splitlines()[0].removeprefix('schedule: ')}") from error


@lru_cache(maxsize=64)
def given(text: Text) -> Schedule:
    """Return the schedule of a text; slices that a micro-batch does not have are left out of it."""
    grid = grid_from(text)
    order = partial(_order, grid)
    return Schedule(SEARCHED, order, held_by(order))


def _order(grid: Grid, placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    return [[action for action in row if action.unit.slice < slices[action.unit.micro_batch]] for row in grid]
