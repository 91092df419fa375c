"""Schedules for property tests: up to 8 stages, 8 micro-batches, 8 slices each, even and uneven; and orders of no name."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

from hypothesis import strategies as st

from ds_terapipe.schedule import NAMES, Action, Op, Unit

stages = st.integers(1, 8)
names = st.sampled_from(NAMES)
even_slices = st.builds(lambda count, each: [each] * count, st.integers(1, 8), st.integers(1, 8))
uneven_slices = st.lists(st.integers(1, 8), min_size=1, max_size=8)
slices = even_slices | uneven_slices


class RandomGrid(NamedTuple):
    """A grid that obeys every rule of `validate`, in an order that no schedule has."""

    grid: list[list[Action]]
    slices: list[int]

    @property
    def interleaved(self) -> bool:
        """Whether, on some stage, two micro-batches are on their way back at the same time."""
        return any(_interleaved([a.unit for a in row if a.op is Op.BACKWARD]) for row in self.grid)


def _interleaved(backward: list[Unit]) -> bool:
    came = [unit.micro_batch for unit in backward]
    return any(came[i] != came[i - 1] and came[i] in came[: i - 1] for i in range(1, len(came)))


@st.composite
def random_grids(
    draw: st.DrawFn, least_stages: int = 1, most_stages: int = 4, weights: bool | None = None
) -> RandomGrid:
    """Messages and weight gradients included, anywhere where the rules let them be."""
    stages = draw(st.integers(least_stages, most_stages))
    each = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    with_weights = draw(st.booleans()) if weights is None else weights
    return random_grid(draw(st.integers(0, 2**32 - 1)), stages, each, with_weights)


def random_grid(seed: int, stages: int, slices: Sequence[int], weights: bool) -> RandomGrid:
    """One of the orders in which a job could run its actions one at a time, whatever they are; a row is a stage's part of it."""
    choice, run = random.Random(seed), _Run(stages, slices, weights)
    while ready := list(run.ready()):
        run.do(choice.choice(ready))
    assert all(len(run.done[stage]) == len(run.wanted[stage]) for stage in range(stages))
    return RandomGrid(run.grid, list(slices))


def interleaved_grid(number: int, stages: int, slices: Sequence[int], weights: bool) -> RandomGrid:
    """The ``number``-th of those random grids in which micro-batches come back together."""
    found = (made for seed in count() if (made := random_grid(seed, stages, slices, weights)).interleaved)
    return next(islice(found, number, None))


class _Run:
    """A job that runs one action at a time."""

    def __init__(self, stages: int, slices: Sequence[int], weights: bool) -> None:
        self.grid: list[list[Action]] = [[] for _ in range(stages)]
        self.done: list[set[tuple[Op, Unit]]] = [set() for _ in range(stages)]
        self._slices, self._last = slices, stages - 1
        self._sent: dict[tuple[int, Op], list[Unit]] = {}  # by receiver: on their way, in order
        units = [Unit(m, i) for m, count in enumerate(slices) for i in range(count)]
        self.wanted = [[(op, u) for op in self._ops(stage) for u in units] for stage in range(stages)]
        if weights:
            for row in self.wanted:
                row += [(Op.WEIGHT_GRADIENTS, Unit(m, 0)) for m in range(len(slices))]

    def _ops(self, stage: int) -> list[Op]:
        ops = [Op.FORWARD, Op.BACKWARD]
        ops += [Op.RECV_FORWARD, Op.SEND_BACKWARD] if stage > 0 else []
        return ops + ([Op.SEND_FORWARD, Op.RECV_BACKWARD] if stage < self._last else [])

    def ready(self) -> Iterator[Action]:
        for stage, wanted in enumerate(self.wanted):
            for op, unit in wanted:
                if (op, unit) not in self.done[stage] and self._may(stage, op, unit):
                    yield Action(op, stage, unit)

    def _may(self, stage: int, op: Op, unit: Unit) -> bool:
        done, (m, i) = self.done[stage], unit
        if op.is_receive:
            return self._sent.get((stage, op), [])[:1] == [unit]
        if op is Op.FORWARD:
            return (stage == 0 or (Op.RECV_FORWARD, unit) in done) and (i == 0 or (op, Unit(m, i - 1)) in done)
        if op is Op.BACKWARD:
            came = stage == self._last or (Op.RECV_BACKWARD, unit) in done
            is_last = i == self._slices[m] - 1
            return came and (Op.FORWARD, unit) in done and (is_last or (op, Unit(m, i + 1)) in done)
        return (Op.FORWARD if op is Op.SEND_FORWARD else Op.BACKWARD, unit) in done

    def do(self, action: Action) -> None:
        op, stage, unit = action
        self.grid[stage].append(action)
        self.done[stage].add((op, unit))
        if op.is_receive:
            self._sent[stage, op].pop(0)
        elif action.counterpart is not None:
            there = action.counterpart
            self._sent.setdefault((there.stage, there.op), []).append(unit)
