"""Schedules by name. A new one is a file beside this that registers it; nothing else has a list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from ..actions import Action
from ..fill import most_live
from ..placement import Placement

Order: TypeAlias = Callable[[Placement, Sequence[int]], list[list[Action]]]
Bound: TypeAlias = Callable[[Placement, Sequence[int]], list[int]]


class Schedule(NamedTuple):
    """A compute order, for any placement that it knows.

    Attributes:
        name: in a configuration, in plans, in logs.
        order: the computations of a step, one list per place, from a placement and the number of slices of each micro-batch.
            Weight gradients are among them, or are put right behind their backward passes where a stage makes them apart.
        bound: from the same, for each place: so many pairs of stage and unit at most have gone forward and not yet backward
            at once, on stages that go backward. `held_by` makes one.
        title: in tables, for a schedule that trains with slices, and that a configuration may name for that; empty for others.
    """

    name: str
    order: Order
    bound: Bound
    title: str = ""

    def __str__(self) -> str:
        return self.name


def held_by(order: Order) -> Bound:
    """Return what an order itself holds at most, as the bound of a schedule."""
    return partial(_held, order)


def _held(order: Order, placement: Placement, slices: Sequence[int]) -> list[int]:
    return [most_live(row, placement) for row in order(placement, slices)]


_SCHEDULES: dict[str, Schedule] = {}


def register(schedule: Schedule) -> Schedule:
    """Make a schedule known by its name. Raises ValueError where another one has it."""
    if schedule.name in _SCHEDULES:
        raise ValueError(f"schedule: got {schedule.name!r} a second time, must be a name of its own")
    _SCHEDULES[schedule.name] = schedule
    return schedule


def trainable() -> tuple[str, ...]:
    """Return the names of schedules that train with slices. Of equal ones, a plan prefers the last."""
    return tuple(sorted((name for name, schedule in _SCHEDULES.items() if schedule.title), reverse=True))


def schedule_named(name: str | Schedule) -> Schedule:
    """Return the schedule of that name, or itself. Raises ValueError, with the known names, if there is none."""
    if isinstance(name, Schedule):
        return name
    if name not in _SCHEDULES:
        raise ValueError(f"schedule: got {name!r}, must be one of {', '.join(map(repr, _SCHEDULES))}")
    return _SCHEDULES[name]
