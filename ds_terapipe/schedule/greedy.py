"""Orders by list scheduling, for any placement: whenever a place is free it takes the best of what is ready.

Backward passes come first, then forward passes, and weight gradients where neither is ready. A forward leaves room for the
forwards of older micro-batches that have yet to come to its place. So the oldest one always goes on, and no place waits for
room for ever.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from .numbered import Numbered, Rows

_NOW = 1e-12


class Rule(NamedTuple):
    """Preference of a place: forwards of ``group`` units go through its stages together, its later ones first if ``deep``."""

    group: int
    deep: bool


def greedy(numbered: Numbered, rule: Rule) -> Rows | None:
    """Return the order by a rule; None where micro-batches do not fit into the memory one by one."""
    run = _Run(numbered, rule)
    while run.events:
        run.go_on(heapq.heappop(run.events))
    complete = all(len(row) == len(kinds) * numbered.units for row, kinds in zip(run.rows, numbered.kinds, strict=True))
    return run.rows if complete and numbered.fit(run.rows) else None


class _Run:
    """A step that goes on from event to event."""

    def __init__(self, numbered: Numbered, rule: Rule) -> None:
        self.events = [0.0]
        self.rows: Rows = [[] for _ in numbered.kinds]
        self._of, self._rule = numbered, rule
        self._following = [kind * numbered.units for kind in range(3 * numbered.stages)]
        self._arrived: dict[int, float] = {}
        self._free: dict[tuple[int, int], float] = {}
        self._clock, self._held = [0.0] * len(self.rows), [0.0] * len(self.rows)
        # on each place, by micro-batch, what its forwards that have yet to come will take
        self._to_come = [[0.0] * len(numbered.slices) for _ in self.rows]
        for place, kinds in enumerate(numbered.kinds):
            for number in (number for kind in kinds if kind < numbered.stages for number in numbered.of_kind(kind)):
                self._to_come[place][numbered.actions[number].unit.micro_batch] += numbered.takes[number]

    def go_on(self, now: float) -> None:
        """Start what is ready at a time."""
        for place, kinds in enumerate(self._of.kinds):
            while self._clock[place] <= now + _NOW:
                ranks = [rank for kind in kinds if (rank := self._rank(place, kind, now)) is not None]
                if not ranks:
                    break
                self._start(place, min(ranks)[-1], now)

    def _rank(self, place: int, kind: int, now: float) -> tuple[int, ...] | None:
        """Return the rank of a kind's next action, and its number; None where it cannot start."""
        of, number = self._of, self._following[kind]
        op, stage = divmod(kind, of.stages)
        if number >= (kind + 1) * of.units:
            return None
        source, own, index = of.source[number], of.own[number], number - kind * of.units
        if source >= 0 and self._arrived.get(source, now + 1) > now + _NOW:
            return None
        if own >= 0 and self._following[own // of.units] <= own:
            return None
        if op:
            return 2 * op - 1, index, -stage, 0, number
        older = sum(self._to_come[place][: of.actions[number].unit.micro_batch])
        if of.takes[number] and self._held[place] + of.takes[number] + older > of.limits[place]:
            return None
        return 2, index // self._rule.group, -stage if self._rule.deep else stage, index, number

    def _start(self, place: int, number: int, now: float) -> None:
        of = self._of
        self.rows[place].append(number)
        self._following[number // of.units] += 1
        ends = self._clock[place] = now + of.seconds[number]
        link, comes = of.link[number], ends
        if link is not None:
            comes = self._free[link] = max(self._free.get(link, 0.0), ends) + of.message[number]
        self._arrived[number] = comes
        for event in {ends, comes}:
            heapq.heappush(self.events, event)
        self._held[place] += of.takes[number]
        if of.op(number) == 0:
            self._to_come[place][of.actions[number].unit.micro_batch] -= of.takes[number]
