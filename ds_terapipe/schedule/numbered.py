"""The computations of a step as numbers, for a search that times thousands of orders.

All stages run the units forward in one order and backward in one order, as the two ends of a channel have to. So an order only
says of which *kind* a place's next action is: a kind is an operation of a stage, and its n-th action is that of the n-th unit.
Weight gradients are those of single slices, in the order of the backward passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple, TypeAlias

from .actions import Action, Grid, Op, Unit
from .lower import covered_slices
from .orders.units import ascending, descending
from .placement import Placement

_OPS = Op.FORWARD, Op.BACKWARD, Op.WEIGHT_GRADIENTS
_HALVES = dict(zip(_OPS, (2.0, -1.0, -1.0), strict=True))
_MORE = 1 + 1e-9  # rounding of sums
Rows: TypeAlias = list[list[int]]
"""The actions of each place by number."""


def halves(action: Action) -> float:
    """Halves of a live unit that an action takes: two in a forward, of which one is left for the weight gradients."""
    return _HALVES[action.op]


class Problem(NamedTuple):
    """A step whose order is wanted.

    Attributes:
        placement: of the stages.
        slices: number of slices of each micro-batch.
        seconds: of a forward, a backward or the weight gradients of one slice.
        message: seconds of a SEND action's message; None: messages take no time.
        takes: memory that an action takes, below 0 where it lets go of some; a step's add up to 0.
        limits: of that memory, by place; None: no limit.
        apart: whether stages that go backward make weight gradients of their own.
    """

    placement: Placement
    slices: Sequence[int]
    seconds: Callable[[Action], float]
    message: Callable[[Action], float] | None = None
    takes: Callable[[Action], float] = halves
    limits: Sequence[float] | None = None
    apart: bool = True

    def durations(self, grid: Grid) -> Callable[[Action], float]:
        """Return the seconds of an order's computations, where weight gradients may be those of several slices."""
        made = {action: found for row in grid for action, found in covered_slices(row, self.slices).items()}

        def seconds(action: Action) -> float:
            if action not in made:
                return self.seconds(action)
            each = (action._replace(unit=Unit(action.unit.micro_batch, index)) for index in made[action])
            return sum(map(self.seconds, each))

        return seconds


class Times(NamedTuple):
    """When each action starts and ends, by number; ``waits``: it starts when its source comes; ``last``: place that ends last."""

    makespan: float
    start: list[float]
    waits: list[bool]
    last: int


class Numbered:
    """The actions of a problem by number, and what they depend on: ``kind * units + n``, the n-th of its kind.

    A kind is ``op * stages + stage``.
    """

    def __init__(self, problem: Problem) -> None:
        where = self.placement = problem.placement
        self.slices = problem.slices
        self.limits = [inf] * where.places if problem.limits is None else [limit * _MORE for limit in problem.limits]
        orders = dict(zip(_OPS, (ascending(self.slices), *[descending(self.slices)] * 2), strict=True))
        stages = range(len(where.stages))
        self.units, self.stages = len(orders[Op.FORWARD]), len(stages)
        self.actions = [Action(op, stage, unit) for op in _OPS for stage in stages for unit in orders[op]]
        self._number = {action: number for number, action in enumerate(self.actions)}
        there = [stages, stages[where.forward_only :], stages[where.forward_only :] if problem.apart else ()]
        self.kinds = [
            [op * self.stages + stage for op in range(3) for stage in where.stages_on(p) if stage in there[op]]
            for p in range(where.places)
        ]
        count = len(self.actions)
        self.seconds, self.takes, self.message = [0.0] * count, [0.0] * count, [0.0] * count
        self.source, self.own = [-1] * count, [-1] * count  # the actions that it needs, on any place and on its own
        self.link: list[tuple[int, int] | None] = [None] * count  # that carries its result
        for number in (number for kinds in self.kinds for kind in kinds for number in self.of_kind(kind)):
            self._describe(problem, number)
        self.work = [
            sum(self.seconds[number] for kind in kinds for number in self.of_kind(kind)) for kinds in self.kinds
        ]

    def _describe(self, problem: Problem, number: int) -> None:
        where, (op, stage, unit, _) = self.placement, self.actions[number]
        self.seconds[number] = problem.seconds(self.actions[number])
        if where.goes_backward(stage):
            self.takes[number] = problem.takes(self.actions[number])
            if op is Op.BACKWARD and not problem.apart:
                self.takes[number] += problem.takes(Action(Op.WEIGHT_GRADIENTS, stage, unit))
        if op is not Op.FORWARD:
            self.own[number] = self._number[Action(_OPS[_OPS.index(op) - 1], stage, unit)]
        if op is Op.WEIGHT_GRADIENTS:
            return
        step, sends, send = (
            (1, where.sends_forward(stage), Op.SEND_FORWARD)
            if op is Op.FORWARD
            else (-1, where.sends_backward(stage), Op.SEND_BACKWARD)
        )
        if 0 <= stage - step < self.stages:
            self.source[number] = number - step * self.units
        if sends:
            self.link[number] = where.place_of(stage), where.place_of(stage + step)
            self.message[number] = 0.0 if problem.message is None else problem.message(Action(send, stage, unit))

    @property
    def size(self) -> int:
        """Number of actions."""
        return self.units * sum(map(len, self.kinds))

    def op(self, number: int) -> int:
        """Return 0 for a forward, 1 for a backward, 2 for weight gradients."""
        return number // (self.stages * self.units)

    def place_of(self, number: int) -> int:
        """Return the place of an action."""
        return self.placement.place_of(self.actions[number].stage)

    def of_kind(self, kind: int) -> range:
        """Return the actions of a kind."""
        return range(kind * self.units, (kind + 1) * self.units)

    def in_turn(self, kinds: Iterable[int]) -> list[int]:
        """Return the actions of a place by their kinds."""
        following: dict[int, int] = {}
        row = []
        for kind in kinds:
            row.append(following.get(kind, kind * self.units))
            following[kind] = row[-1] + 1
        return row

    def rows_of(self, grid: Grid) -> Rows:
        """Return the rows of an order, weight gradients divided into slices, with units in the order of these."""
        rows = []
        for row, allowed in zip(grid, self.kinds, strict=True):
            made = covered_slices(row, self.slices)
            kinds = [
                _OPS.index(action.op) * self.stages + action.stage
                for action in row
                if action.op.is_compute
                for _ in made.get(action, (0,))
            ]
            rows.append(self.in_turn(kind for kind in kinds if kind in allowed))
        return rows

    def grid_of(self, rows: Rows) -> list[list[Action]]:
        """Return the actions of rows."""
        return [[self.actions[number] for number in row] for row in rows]

    def peak(self, row: Iterable[int]) -> float:
        """Return the most memory that a place's row holds."""
        return max(accumulate(map(self.takes.__getitem__, row)), default=0.0)

    def fit(self, rows: Rows) -> bool:
        """Whether rows keep to the memory limits."""
        return all(self.peak(row) <= limit for row, limit in zip(rows, self.limits, strict=True))

    def tight(self, rows: Rows) -> int:
        """Return how many stages go backward first after no more forwards than the stage behind them."""
        warm_up: dict[int, int] = {}
        for row in rows:
            forwards = [0] * self.stages
            for number in row:
                op, stage = divmod(number // self.units, self.stages)
                if op == 0:
                    forwards[stage] += 1
                elif op == 1:
                    warm_up.setdefault(stage, forwards[stage])
        return sum(count <= warm_up.get(stage + 1, -1) for stage, count in warm_up.items())

    def times(self, rows: Rows, most: float = inf) -> Times | None:
        """Return the times of an order, as `replay` has them; None where places wait for ever, or for longer than ``most``."""
        seconds, source, own, link, message = self.seconds, self.source, self.own, self.link, self.message
        count = len(self.actions)
        start, arrived, waits, done = [0.0] * count, [-1.0] * count, [False] * count, bytearray(count)
        clock, at, idle = [0.0] * len(rows), [0] * len(rows), [most - work for work in self.work]
        if min(idle) < 0:
            return None
        free: dict[tuple[int, int], float] = {}
        waiting: dict[int, int] = {}
        ready, left = deque(range(len(rows))), len(rows)
        while ready:
            place = ready.popleft()
            row, now = rows[place], clock[place]
            for index in range(at[place], len(row)):
                number = row[index]
                needs = source[number]
                if needs >= 0:
                    came = arrived[needs]
                    if came < 0:
                        waiting[needs] = place
                        at[place], clock[place] = index, now
                        break
                    if came > now:
                        idle[place] -= came - now
                        if idle[place] < 0:
                            return None
                        waits[number], now = True, came
                needs = own[number]
                if needs >= 0 and not done[needs]:
                    return None
                done[number] = 1
                start[number] = now
                now += seconds[number]
                to = link[number]
                if to is None:
                    arrived[number] = now
                else:
                    arrived[number] = free[to] = max(free.get(to, 0.0), now) + message[number]
                if number in waiting:
                    ready.append(waiting.pop(number))
            else:
                clock[place], left = now, left - 1
        if left:
            return None
        last = max(range(len(clock)), key=clock.__getitem__)
        return Times(clock[last], start, waits, last)
