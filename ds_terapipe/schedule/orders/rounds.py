"""1F1B of slices where stage s is on place s mod K, several stages on each place: units go around in groups.

A group is the fewest micro-batches with at least K units. Forward, a place runs all units of a group through its first stage,
then through its second one, and so on; backward through its last stage first, the slices of a micro-batch descending. A unit of
its first group must come back before a place goes backward: that is the warm-up of the last place. Each place before it has one
unit more on the way. Megatron and Seq1F1B (arXiv 2406.03488) have two, which takes the same time and more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..actions import Action, Op, Unit
from ..placement import Placement
from .units import ascending

_Sequence: TypeAlias = list[tuple[int, Unit]]


def fits(placement: Placement) -> bool:
    """Whether all places have the same number of stages, two or more, in turn, and all go backward.

    A forward-only stage would hold a group's outputs, for which nothing bounds it.
    """
    places, stages = placement.places, len(placement.stages)
    in_turn = all(stage.place == number % places for number, stage in enumerate(placement.stages))
    return in_turn and stages > places > 1 and stages % places == 0 and not placement.forward_only


def order(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    """The forward and backward passes on each place."""
    forward, backward = _sequences(placement, slices)
    places = placement.places
    grid = []
    for place in range(places):
        warm_up = _warm_up(place, placement, forward, backward)
        there = [Action(Op.FORWARD, chunk * places + place, unit) for chunk, unit in forward]
        back = [Action(Op.BACKWARD, chunk * places + place, unit) for chunk, unit in backward]
        pairs = [each for pair in zip(there[warm_up:], back, strict=False) for each in pair]
        grid.append(there[:warm_up] + pairs + back[len(there) - warm_up :])
    return grid


def bound(placement: Placement, slices: Sequence[int]) -> list[int]:
    """The most pairs of stage and unit that are live on each place."""
    forward, backward = _sequences(placement, slices)
    return [min(_warm_up(place, placement, forward, backward) + 1, len(forward)) for place in range(placement.places)]


def _warm_up(place: int, placement: Placement, forward: _Sequence, backward: _Sequence) -> int:
    """Forwards of a place before its first pair of one forward and one backward."""
    index = {each: number for number, each in enumerate(forward)}
    last = max(index[each] - number for number, each in enumerate(backward))  # of the last place
    return min(len(forward), last + placement.places - 1 - place)


def _sequences(placement: Placement, slices: Sequence[int]) -> tuple[_Sequence, _Sequence]:
    """The forwards and the backwards of any place: which of its stages, and which unit."""
    chunks = range(len(placement.stages) // placement.places)
    groups = _groups(slices, placement.places)
    forward = [(chunk, unit) for group in groups for chunk in chunks for unit in group]
    backward = [
        (chunk, unit)
        for group in groups
        for chunk in reversed(chunks)
        for unit in sorted(group, key=lambda unit: (unit.micro_batch, -unit.slice))
    ]
    return forward, backward


def _groups(slices: Sequence[int], least: int) -> list[list[Unit]]:
    groups: list[list[Unit]] = [[]]
    for unit in ascending(slices):
        if unit.slice == 0 and len(groups[-1]) >= least:
            groups.append([])
        groups[-1].append(unit)
    return groups
