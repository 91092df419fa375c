"""Weight gradients that fill the time in which a place waits (zero bubble: Qi et al., ICLR 2024, arXiv 2401.10241).

Nothing waits for a weight gradient within a step, so one may be made whenever its place has nothing else to do. The order of
forward and backward passes stays as it is. A place makes a weight gradient where it would wait, if it is made before the
awaited message comes; where memory asks for it, before the next forward; and at the end.

Memory counts in halves of a live unit: a forward takes two, its backward gives one back, and the operands that wait for
the weight gradient are the other. No place may hold more than the fullest one holds where none wait. The first places of 1F1B
are the fullest, the last ones have room, and that is enough: for slices of equal cost every order reaches the bound of its
forward and backward passes, time / ideal = 1 + (K - 1) / (3 M n v) for M >= 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from .actions import Action, Grid, Group, Op, Unit
from .placement import Placement

_FORWARD, _BACKWARD, _WEIGHTS = 2, -1, -1  # halves of a live unit that an action takes


def fill(
    grid: Grid, placement: Placement, seconds: Callable[[Action], float] = lambda action: 1.0
) -> list[list[Action]]:
    """Put weight gradients of single slices into the waits of an order.

    Those of one micro-batch that follow each other become one action.

    Args:
        grid: forward and backward passes on each place, an order that can run.
        placement: of the stages.
        seconds: of a forward, a backward or the weight gradients of one slice; messages take no time.
    """
    most = 2 * max(most_live(row, placement) for row in grid)
    places = [_Place(row, placement, seconds, most) for row in grid]
    ended: dict[tuple[Op, int, Unit], float] = {}
    while any(place.go_on(ended) for place in places):
        pass
    return [list(together(place.finish())) for place in places]


def most_live(row: Iterable[Action], placement: Placement) -> int:
    """Return the most pairs of stage and unit that are live at once on a place, on stages that go backward."""
    lives = {Op.FORWARD: 1, Op.BACKWARD: -1}
    return max(accumulate(lives.get(a.op, 0) for a in row if placement.goes_backward(a.stage)), default=0)


class _Place:
    """A place that goes along its passes."""

    def __init__(
        self, row: Sequence[Action], placement: Placement, seconds: Callable[[Action], float], limit: int
    ) -> None:
        self.passes = deque(row)
        self._placement, self._seconds, self._limit = placement, seconds, limit
        self._row: list[Action] = []
        self._waiting: deque[Action] = deque()
        self._clock, self._held = 0.0, 0

    def go_on(self, ended: dict[tuple[Op, int, Unit], float]) -> bool:
        """Run the next passes until one waits for what has not ended; whether any ran."""
        before = len(self.passes)
        while self.passes:
            action = self.passes[0]
            source = self._source(action)
            ready = 0.0 if source is None else ended.get(source)
            if ready is None:
                break
            self.passes.popleft()
            trained = self._placement.goes_backward(action.stage)
            takes = (_FORWARD if action.op is Op.FORWARD else _BACKWARD) if trained else 0
            while self._waiting and (
                self._held + takes > self._limit or self._clock + self._seconds(self._waiting[0]) <= ready
            ):
                self._make_weights()
            self._clock = max(self._clock, ready)
            self._run(action, takes)
            ended[action[:3]] = self._clock
            if action.op is Op.BACKWARD:
                self._waiting.append(action._replace(op=Op.WEIGHT_GRADIENTS))
        return len(self.passes) < before

    def finish(self) -> list[Action]:
        """Make what is left, and return the row."""
        while self._waiting:
            self._make_weights()
        return self._row

    def _source(self, action: Action) -> tuple[Op, int, Unit] | None:
        """The pass that makes the input, or the gradient of the output."""
        op, stage, unit, _ = action
        if op is Op.FORWARD:
            return (op, stage - 1, unit) if stage > 0 else None
        return (op, stage + 1, unit) if stage + 1 < len(self._placement.stages) else None

    def _make_weights(self) -> None:
        self._run(self._waiting.popleft(), _WEIGHTS)

    def _run(self, action: Action, takes: int) -> None:
        self._clock += self._seconds(action)
        self._held += takes
        self._row.append(action)


def together(row: Iterable[Action]) -> Iterator[Action]:
    """Yield a row in which the last of consecutive weight gradients of a stage and micro-batch makes all of them."""
    pending: dict[tuple[int, int, Group], Action] = {}
    for action in row:
        if action.op is Op.WEIGHT_GRADIENTS:
            pending[action.stage, action.unit.micro_batch, action.group] = action
        else:
            yield from pending.values()
            pending.clear()
            yield action
    yield from pending.values()
