"""1F1B of slices where stage s is on place s mod K, several stages on each place: units go around in groups.

A group is the fewest micro-batches with at least K units. Forward, a place runs all units of a group through its first stage,
then through its second one, and so on; backward through its last stage first, the slices of a micro-batch descending. A unit of
its first group must come back before a place goes backward: that is the warm-up of the last place. Each place before it has one
unit more on the way. Megatron and Seq1F1B (arXiv 2406.03488) have two, which takes the same time and more memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..actions import Action, Op, Unit
from ..placement import Placement
from .units import alternate, ascending


def in_turn(placement: Placement) -> bool:
    """Whether stage s is on place s mod K, and each place has as many."""
    places = placement.places
    each = all(stage.place == number % places for number, stage in enumerate(placement.stages))
    return each and len(placement.stages) % places == 0


def around(
    placement: Placement, forward: Sequence[Sequence[Unit]], backward: Sequence[Sequence[Unit]], ahead: int
) -> list[list[Action]]:
    """Return the passes on each place of units that go around the places in groups.

    Args:
        placement: of the stages.
        forward, backward: the units of each group.
        ahead: units that each place has on the way beyond those of the next one.
    """
    rows = []
    for place in range(placement.places):
        stages = placement.stages_on(place)
        forwards = [Action(Op.FORWARD, stage, unit) for group in forward for stage in stages for unit in group]
        backwards = [Action(Op.BACKWARD, s, unit) for group in backward for s in stages[::-1] for unit in group]
        at = {action[1:]: index for index, action in enumerate(forwards)}
        own = max(at[action[1:]] - index for index, action in enumerate(backwards))
        # so many forwards come before the first pair of both
        warm_up = min(len(forwards), own + ahead * (placement.places - place - 1))
        row = alternate(forwards, backwards, warm_up)
        rows.append([a for a in row if a.op is Op.FORWARD or placement.goes_backward(a.stage)])
    return rows


def fits(placement: Placement) -> bool:
    """Whether all places have the same number of stages, two or more, in turn, and all go backward.

    A forward-only stage would hold a group's outputs, for which nothing bounds it.
    """
    return in_turn(placement) and len(placement.stages) > placement.places > 1 and not placement.forward_only


def order(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    """The forward and backward passes on each place."""
    groups: list[list[Unit]] = [[]]
    for unit in ascending(slices):
        if unit.slice == 0 and len(groups[-1]) >= placement.places:
            groups.append([])
        groups[-1].append(unit)
    backward = [sorted(group, key=lambda unit: (unit.micro_batch, -unit.slice)) for group in groups]
    return around(placement, groups, backward, ahead=1)
