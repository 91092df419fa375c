"""The compute order of each schedule, a place at a time: one schedule a file, in a registry. All files here are imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from ..actions import Action
from ..placement import Placement, as_placement
from . import rounds
from .forwards import FORWARD_ONLY
from .interleaved import INTERLEAVED
from .one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from .registry import Schedule, register, schedule_named, trainable
from .zero_bubble import ZERO_BUBBLE

for _module in iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)

NAMES = trainable()
"""Schedules of this package for any placement."""


def choices() -> tuple[str, ...]:
    """Return the schedules that a configuration may name, those among them that were registered since the import."""
    return (*trainable(), INTERLEAVED.name)


def names_on(placement: Placement) -> tuple[str, ...]:
    """Return the schedules to compare on a placement, of equal ones the preferred last; ``interleaved`` in turn."""
    return (INTERLEAVED.name, *trainable()) if rounds.fits(placement) else trainable()


def order(name: str | Schedule, stages: int | Placement, slices: Sequence[int]) -> list[list[Action]]:
    """Computations of one step in the order in which each place runs them.

    Args:
        name: of a schedule: ``terapipe``, ``1f1b``, ``zero_bubble``, ``interleaved``, ``forward_only`` or one of your own;
            or a schedule.
        stages: the placement, or a number of stages, each on its own place.
        slices: number of slices of each micro-batch; they may differ.

    Returns:
        One list of FORWARD and BACKWARD actions per place: each unit once forward on each stage, and once backward where the
        stage goes backward. A schedule may place weight gradients, too.

    Raises:
        ValueError: unknown name, no stage, no micro-batch, a micro-batch without slices, a placement that the schedule does not
            know, or a schedule that trains where all stages are forward-only.
    """
    schedule = schedule_named(name)
    return schedule.order(_checked(schedule, stages), slices)


def forward_only(stages: int | Placement, slices: Sequence[int]) -> list[list[Action]]:
    """Computations of one evaluation step: every unit forward on every stage. Arguments and errors as in `order`."""
    return order(FORWARD_ONLY.name, stages, slices)


def peak_live_units(name: str | Schedule, stages: int | Placement, slices: Sequence[int]) -> list[int]:
    """Return the largest number of live units on each place: run forward but not yet backward, with activations held.

    A unit counts once for each stage that goes backward.
    Arguments and errors as in `order`.
    """
    schedule = schedule_named(name)
    return schedule.bound(_checked(schedule, stages), slices)


def _checked(schedule: Schedule, stages: int | Placement) -> Placement:
    placement = as_placement(stages)
    if placement.forward_only == len(placement.stages) and schedule is not FORWARD_ONLY:
        raise ValueError(
            f"forward_only: got all {len(placement.stages)} stages, must be fewer to train with {schedule.name!r}, use "
            f"{FORWARD_ONLY.name!r}"
        )
    return placement
