"""Schedules for property tests: up to 8 stages, 8 micro-batches, 8 slices each, even and uneven; and orders of no name."""

import random
from collections.abc import Sequence
from itertools import product

from hypothesis import strategies as st

from ds_terapipe.schedule import ALL, Action, Group, Op, Placement, Unit
from ds_terapipe.schedule.lower import with_messages
from ds_terapipe.schedule.orders import NAMES, Schedule, order, register, schedule_named

stages = st.integers(1, 8)
names = st.sampled_from(NAMES)
SCHEDULES = " or ".join(f'"{name}"' for name in NAMES)  # as errors list them
HALVES = Group(0, 2), Group(1, 2)


def _late(placement: Placement, slices: Sequence[int]) -> list[list[Action]]:
    """1F1B; weight gradients of later slices behind their micro-batch, and those of the others at the end, in two groups."""
    rows: list[list[Action]] = []
    for row in order("1f1b", placement, slices):
        rows.append([])
        ended = [action for action in row if action.op is Op.BACKWARD and action.unit.slice == 0]
        for action in row:
            rows[-1].append(action)
            later = slices[action.unit.micro_batch] // 2
            if action in ended and later:
                unit = Unit(action.unit.micro_batch, later)
                rows[-1] += [Action(Op.WEIGHT_GRADIENTS, action.stage, unit, group) for group in HALVES]
        rows[-1] += [a._replace(op=Op.WEIGHT_GRADIENTS, group=group) for a in ended for group in HALVES[::-1]]
    return rows


LATE = register(Schedule("late", _late, schedule_named("1f1b").bound))
names_and_late = st.sampled_from((*NAMES, LATE.name))
even_slices = st.builds(lambda count, each: [each] * count, st.integers(1, 8), st.integers(1, 8))
slices = even_slices | st.lists(st.integers(1, 8), min_size=1, max_size=8)
few_slices = st.lists(st.integers(1, 4), min_size=1, max_size=6)
few_or_long = few_slices | st.lists(st.integers(4, 9), min_size=1, max_size=2)

KNOWN_PLACES = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (1, 0), (0, 1, 2, 1, 0))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Stages on places in any order, some of the first ones forward-only, at least one trained."""
    places = draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    if draw(st.booleans()):  # else the first stage would always be on place 0
        numbers = {place: len(numbers) - 1 - number for place, number in numbers.items()}
    chosen = draw(st.sampled_from(KNOWN_PLACES) | st.just(tuple(numbers[place] for place in places)))
    return Placement.of(chosen, forward_only=draw(st.integers(0, len(chosen) - 1)))


in_turn = st.builds(Placement.interleaved, st.integers(1, 8), st.integers(1, 4))


def grid_of(*rows: str) -> list[list[Action]]:
    return [list(map(Action.from_text, row.split())) for row in rows]


def rows_of(grid: Sequence[Sequence[Action]], last: int | None = None) -> list[str]:
    """The rows of a grid as text; ``last``: how many actions of each, from its end."""
    return [" ".join(map(str, row if last is None else row[-last:])) for row in grid]


def random_grid(seed: int, placement: Placement, slices: Sequence[int], weights: bool = True) -> list[list[Action]]:
    """A grid that obeys every rule of `validate`: one of the orders in which a job could run its actions one at a time."""
    groups = () if not weights else HALVES if seed % 3 == 0 else (ALL,)
    choice, run = random.Random(seed), _Run(placement, slices, groups, each_slice=bool(seed % 2))
    while ready := [action for action in run.wanted if action not in run.done and run.may(action)]:
        run.do(choice.choice(ready))
    assert len(run.done) == len(run.wanted)
    return run.grid


class _Run:
    """A job that runs one action at a time."""

    def __init__(self, placement: Placement, slices: Sequence[int], groups: Sequence[Group], each_slice: bool) -> None:
        self.placement, self.grid = placement, [list[Action]() for _ in range(placement.places)]
        self.done: set[Action] = set()
        self._slices, self._each_slice = slices, each_slice
        self._sent: dict[tuple[int, Op], list[Unit]] = {}  # by receiver: on their way, in order
        units = [Unit(m, i) for m, count in enumerate(slices) for i in range(count)]
        self.wanted = [action for row in with_messages(order("1f1b", placement, slices), placement) for action in row]
        trained = range(placement.forward_only, len(placement.stages))
        made = product(trained, [unit for unit in units if each_slice or unit.slice == 0], groups)
        self.wanted += [Action(Op.WEIGHT_GRADIENTS, *each) for each in made]

    def may(self, action: Action) -> bool:
        op, stage, unit, group = action
        done, where, (m, i) = self.done, self.placement, unit
        if op.is_receive:
            return self._sent.get((stage, op), [])[:1] == [unit]
        if op is Op.FORWARD:
            received = where.receives_forward(stage)
            came = stage == 0 or (Action(Op.RECV_FORWARD, *action[1:]) if received else Action(op, stage - 1, unit)) in done
            return came and (i == 0 or Action(op, stage, Unit(m, i - 1)) in done)
        if op is Op.BACKWARD:
            source = Action(Op.RECV_BACKWARD, *action[1:]) if where.sends_forward(stage) else Action(op, stage + 1, unit)
            came = stage == len(where.stages) - 1 or source in done
            is_last = i == self._slices[m] - 1
            forward = Action(Op.FORWARD, stage, unit) in done
            return came and forward and (is_last or Action(op, stage, Unit(m, i + 1)) in done)
        if op is Op.WEIGHT_GRADIENTS:
            later = [Action(op, stage, Unit(m, j), group) for j in range(i + 1, self._slices[m] * self._each_slice)]
            return Action(Op.BACKWARD, stage, unit) in done and self.done.issuperset(later)
        return Action(Op.FORWARD if op is Op.SEND_FORWARD else Op.BACKWARD, stage, unit) in done

    def do(self, action: Action) -> None:
        op, stage, unit, _ = action
        self.grid[self.placement.place_of(stage)].append(action)
        self.done.add(action)
        if op.is_receive:
            self._sent[stage, op].pop(0)
        elif action.counterpart is not None:
            there = action.counterpart
            self._sent.setdefault((there.stage, there.op), []).append(unit)
