"""The schedule of a step, made and proven once per shape of a step."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ds_terapipe.schedule import Action, Op, Unit, forward_only, order, validate, with_messages, with_weight_gradients

FORWARD_ONLY = "forward_only"


class StepPlan(NamedTuple):
    """One row of actions per stage, sends and receives included."""

    grid: tuple[tuple[Action, ...], ...]

    def units(self, op: Op, stage: int) -> list[Unit]:
        """The units of one kind of action in the order in which a stage comes to them."""
        return [action.unit for action in self.grid[stage] if action.op == op]


@lru_cache(maxsize=32)
def plan_step(name: str, stages: int, slices: tuple[int, ...], weights_once: bool = False) -> StepPlan:
    """The validated schedule ``name`` (``forward_only`` for evaluation) for ``slices[m]`` slices of micro-batch ``m``.

    ``weights_once``: weight gradients are made once per micro-batch, as actions of their own.
    """
    computed = forward_only(stages, slices) if name == FORWARD_ONLY else order(name, stages, slices)
    grid = with_messages(computed)
    if weights_once and max(slices) > 1:
        grid = with_weight_gradients(grid)
    validate(grid, slices, name)
    return StepPlan(tuple(tuple(row) for row in grid))
