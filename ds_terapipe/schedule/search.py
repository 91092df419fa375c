"""Orders found by search, from measured costs and under a memory limit.

The starts are named orders with filled waits and those of list scheduling (`greedy`). The best are improved by moves of actions
along a longest path through the step. On a stretch of it without a wait, on one place, only two things can gain: an action
leaves the stretch, or another one ends it. A move that makes the step a little longer is accepted too, at first. Of orders of one
time the one stays in which fewer neighbouring stages go backward first after equally many forwards: where there is slack of one,
a small delay of one does not delay the other (arXiv 2504.19232). `validate` judges what is returned.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from .actions import Action, Grid
from .fill import fill, together
from .greedy import Rule, greedy
from .lower import with_messages
from .numbered import Numbered, Problem, Rows, Times
from .orders import ONE_FORWARD_ONE_BACKWARD, rounds
from .replay import replay
from .validate import ScheduleError, validate

_TIMED = 950_000  # actions in a second
_EACH = 16  # orders for each action of the step, at most

_GREEDY = 10  # times as long as to time an order takes list scheduling
_CLIMBS = 3  # starts that are improved
_WORSE = 0.004  # share of the best time that is accepted on top of it at first
_FAR = 12  # actions that a move passes beyond a stretch at most
_JUDGED = 8  # orders of a climb that are judged at most, from the best one back
_LESS = 1 - 1e-9


class Found(NamedTuple):
    """An order that was found.

    Attributes:
        problem: index of the problem that it solves.
        grid: computations of each place; with messages where some have to be sent later than right behind their results.
        seconds: time of the step.
    """

    problem: int
    grid: list[list[Action]]
    seconds: float


def search(problems: Sequence[Problem], starts: Sequence[Grid] = (), seconds: float = 10.0) -> Found | None:
    """Return the fastest order that was found; None where none fits into the memory and comes to its end.

    The same arguments give the same order.

    Args:
        problems: the same step in other cuts or placements, of which one is chosen.
        starts: further orders to begin with, of the first problem.
        seconds: so long the search takes about. It is a number of orders that are timed, whatever the machine; a small step
            gets fewer.
    """
    numbered = [Numbered(problem) for problem in problems]
    size = max(of.size for of in numbered)
    left = min(_EACH * size, int(seconds * _TIMED / size))
    climbs: dict[tuple[int, str], _Climb] = {}
    named, ruled = _named(problems, numbered, starts), _ruled(numbered)
    for index, rows, cost in chain(named, islice(ruled, max(left // (3 * _GREEDY), len(numbered)))):
        left, of = left - cost, numbered[index]
        if rows is not None and of.fit(rows) and (times := of.times(rows)) is not None:
            climbs.setdefault((index, str(rows)), _Climb(index, of, rows, times))
    best = sorted(climbs.values(), key=lambda climb: climb.best)[:_CLIMBS]
    for number, climb in enumerate(best):
        climb.run(left // len(best), random.Random(number))
    found: Found | None = None
    for climb in sorted(best, key=lambda climb: climb.best):
        if found is None or climb.best[0] < found.seconds * _LESS:
            judged = climb.judged(problems[climb.problem])
            if judged is not None and (found is None or judged.seconds < found.seconds * _LESS):
                found = judged
    return found


def judged(problem: Problem, grid: Grid) -> tuple[list[list[Action]], float] | None:
    """Return an order as `Found` has it, and its time; None where some places would wait for ever.

    A single hardware queue counts.
    """
    where, seconds = problem.placement, problem.durations(grid)
    lowered = with_messages(grid, where, seconds)
    try:
        validate(lowered, problem.slices, None, where)
    except ScheduleError:
        return None
    plain = [list(row) for row in grid]
    as_usual = with_messages(plain, where) == lowered
    return plain if as_usual else lowered, replay(lowered, seconds, problem.message, where).makespan


def _named(
    problems: Sequence[Problem], numbered: Sequence[Numbered], given: Sequence[Grid]
) -> Iterator[tuple[int, Rows | None, int]]:
    """Yield orders to begin with: number of the problem, rows, and how many timed orders that is worth."""
    yield from ((0, numbered[0].rows_of(grid), 1) for grid in given)
    for index, (of, problem) in enumerate(zip(numbered, problems, strict=True)):
        where = problem.placement
        for each in (ONE_FORWARD_ONE_BACKWARD.order, *([rounds.order] if rounds.fits(where) else [])):
            passes = each(where, problem.slices)
            yield index, of.rows_of(fill(passes, where, problem.seconds) if problem.apart else passes), 2


def _ruled(numbered: Sequence[Numbered]) -> Iterator[tuple[int, Rows | None, int]]:
    """Yield those of list scheduling in the same form; the rules that were best most often come first."""
    places, slices = numbered[0].placement.places, max(numbered[0].slices)
    groups = dict.fromkeys((max(places // 2, 1), places, slices))
    for rule in (Rule(group, deep) for group in groups for deep in (False, True)):
        yield from ((index, greedy(of, rule), _GREEDY) for index, of in enumerate(numbered))


class _Climb:
    """An order that is improved."""

    def __init__(self, problem: int, of: Numbered, rows: Rows, times: Times) -> None:
        self.problem, self._of = problem, of
        self.best = times.makespan, of.tight(rows)
        self._history = [rows]  # each better than those before it
        self._accept(rows, times)

    def run(self, evaluations: int, choice: random.Random) -> None:
        """Try so many moves."""
        for number in range(evaluations):
            place, row = self._move(choice)
            rows = [*self._rows]
            rows[place] = row
            worse = self.best[0] * (1 + _WORSE * (1 - number / evaluations) ** 2)
            fits = self._of.peak(row) <= self._of.limits[place]
            times = self._of.times(rows, max(worse, self._times.makespan)) if fits else None
            if times is not None:
                self._accept(rows, times)

    def _accept(self, rows: Rows, times: Times) -> None:
        self._rows, self._times = rows, times
        self._stretches = self._longest_path()
        if times.makespan <= self.best[0]:
            now = times.makespan, self._of.tight(rows)
            if now[0] < self.best[0] * _LESS or now < self.best:
                self.best = now
                self._history.append(rows)

    def _move(self, choice: random.Random) -> tuple[int, list[int]]:
        """Return a place on the longest path, and its row with an action of a stretch elsewhere."""
        place, first, last = choice.choice(self._stretches)
        kinds = [number // self._of.units for number in self._rows[place]]
        at, way = choice.randint(first, last), choice.random()
        if way < 0.45:  # before the stretch, or earlier in it
            to = choice.randint(max(first - _FAR, 0), at)
        elif way < 0.7:  # the last one goes on with the path earlier
            at, to = last, at
        else:
            to = min(choice.randint(last, last + _FAR // 3), len(kinds) - 1)
        kinds.insert(to, kinds.pop(at))
        return place, self._of.in_turn(kinds)

    def _longest_path(self) -> list[tuple[int, int, int]]:
        """Return its stretches: a place, and the indices of the first and the last action."""
        waits, source = self._times.waits, self._of.source
        place = self._times.last
        index = last = len(self._rows[place]) - 1
        found = []
        while index >= 0:
            number = self._rows[place][index]
            if not waits[number] and index > 0:
                index -= 1
                continue
            found.append((place, index, last))
            if not waits[number]:
                break
            place = self._of.place_of(source[number])
            index = last = self._rows[place].index(source[number])
        return found

    def judged(self, problem: Problem) -> Found | None:
        """Return the best order that comes to its end; None where none of the last ones does."""
        for rows in self._history[: -_JUDGED - 1 : -1]:
            found = judged(problem, [list(together(row)) for row in self._of.grid_of(rows)])
            if found is not None:
                return Found(self.problem, *found)
        return None
