"""Proves that a whole schedule can run, and runs right, before any process starts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .actions import ALL, Action, Grid, Group, Op, Unit
from .hardware_queue import queue_deadlock
from .lower import complete, has_messages
from .orders import FORWARD_ONLY, Schedule, peak_live_units
from .orders.units import ascending
from .placement import Placement, placement_of, row_word
from .render import grid_text
from .replay import replay


class ScheduleError(ValueError):
    """A schedule that breaks a rule. The message is the rule, then the grid around the bad cell, marked ``<-- ...``.

    Attributes:
        at: the first bad cell, ``stage 1, 1F0.2``, or ``stage 1, end``.
    """

    at: str = "schedule"


def validate(
    grid: Grid, slices: Sequence[int], name: str | Schedule | None = None, placement: Placement | None = None
) -> None:
    """Checks a schedule for all places at once.

    - Each stage runs every unit once forward and, in training and where it goes backward, once backward; forward before
      backward; the slices of a micro-batch ascending forward and descending backward.
    - Each input is received before its computation and each result sent after it, once; both ends of a channel (one
      direction between two consecutive stages) name the units in one order. Of two consecutive stages on one place the first
      goes forward first, the second backward.
    - No place waits for ever: neither where sends are buffered and receives wait, nor where all streams share one queue and few
      messages may wait to be taken (`hardware_queue`).
    - A stage that makes weight gradients of its own makes them for every micro-batch: in descending order of slices, each after
      the backward of its slice, slice 0 last; where they are made by groups of layers, so for each group.
    - Live units on each place stay within the bound of the schedule's name.

    A grid without any message is a compute order: it is checked as `lower.with_messages` completes it. In a grid with
    messages all of them must be there.

    Args:
        grid: one list of actions per place, with or without messages.
        slices: number of slices of each micro-batch.
        name: of a schedule, e.g. ``"terapipe"``, ``"1f1b"`` or ``"forward_only"``, or a schedule. Without it the live units
            are not checked, and a grid that has no BACKWARD at all passes as forward-only.
        placement: of the stages; None: one on each place.

    Raises:
        ScheduleError: a rule is broken.
        ValueError: unknown name, no micro-batch, a micro-batch without slices, or a placement on another number of places.
    """
    units = ascending(slices)
    if not grid:
        raise ScheduleError("schedule: got no stages, must have at least one")
    where = placement_of(len(grid), placement)
    bounds = None if name is None or str(name) == FORWARD_ONLY.name else peak_live_units(name, where, slices)
    ran_backward = any(action.op is Op.BACKWARD for row in grid for action in row)
    training = bounds is not None or (name is None and ran_backward)
    lowered = has_messages(grid) or len(grid) == 1  # one place sends nothing
    checked = _Checked(grid, slices, where, training, lowered)
    for place in range(len(grid)):
        _check_place(checked, place, units)
    whole = complete(grid, where)
    _check_channels(whole, where)
    _run(whole, where)
    if bounds is not None:
        _check_bounds(grid, where, bounds, str(name))


class _Checked(NamedTuple):
    """A grid under examination."""

    grid: Grid
    slices: Sequence[int]
    where: Placement
    training: bool
    lowered: bool

    def expected(self, stage: int) -> list[Op]:
        """The operations that a stage does once for every unit."""
        where, backward = self.where, self.training and self.where.goes_backward(stage)
        ops = [Op.FORWARD]
        if self.lowered:
            ops += [Op.RECV_FORWARD] * where.receives_forward(stage) + [Op.SEND_FORWARD] * where.sends_forward(stage)
        if backward:
            ops += [Op.BACKWARD]
        if backward and self.lowered:
            ops += [Op.RECV_BACKWARD] * where.receives_backward(stage)
            ops += [Op.SEND_BACKWARD] * where.sends_backward(stage)
        return ops

    def within(self, stage: int) -> bool:
        """Whether the stage and the one before it are on one place, so that they hand over in memory."""
        return 0 < stage < len(self.where.stages) and not self.where.receives_forward(stage)


def _check_place(checked: _Checked, place: int, units: Sequence[Unit]) -> None:
    """Check every rule that concerns one place alone."""
    grid = checked.grid
    stages = checked.where.stages_on(place)
    expected = {stage: checked.expected(stage) for stage in stages}
    for stage in {action.stage for action in grid[place] if action.op is Op.WEIGHT_GRADIENTS}:
        if Op.BACKWARD in expected.get(stage, ()):
            expected[stage].append(Op.WEIGHT_GRADIENTS)
    done: set[Action] = set()
    counts: dict[tuple[int, int], int] = {}
    for index, action in enumerate(grid[place]):
        problem = _misplaced(action, checked, place, expected)
        if problem is None and action in done:
            problem = f"{action} is there a second time"
        if problem is None:
            problem = _out_of_turn(action, checked, expected[action.stage], done, counts)
        if problem is not None:
            raise _error(problem, grid, checked.where, {place: index})
        done.add(action)
    wanted = [Action(op, stage, unit) for stage in stages for op in expected[stage] for unit in units]
    absent = [a for each in wanted for a in _parts(each, counts) if a not in done]
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise _error(f"{absent[0]} is missing{more}", grid, checked.where, {place: len(grid[place])})


def _parts(action: Action, counts: Mapping[tuple[int, int], int]) -> Iterator[Action]:
    """Yield what must be there for an action that is wanted: weight gradients end with slice 0, of each group."""
    if action.op is not Op.WEIGHT_GRADIENTS:
        yield action
    elif action.unit.slice == 0:
        count = counts.get((action.stage, action.unit.micro_batch), 1)
        yield from (action._replace(group=Group(index, count)) for index in range(count))


def _misplaced(action: Action, checked: _Checked, place: int, expected: Mapping[int, list[Op]]) -> str | None:
    op, stage, unit, group = action
    if stage not in expected:
        word = row_word(checked.where)
        return f"{action} belongs to stage {stage}" + ("" if word == "stage" else f", which is not on place {place}")
    if not (0 <= unit.micro_batch < len(checked.slices) and 0 <= unit.slice < checked.slices[unit.micro_batch]):
        return f"{action} names a unit that does not exist; slices of the micro-batches: {list(checked.slices)}"
    if op not in expected[stage]:
        return f"{action} has no place on stage {stage}, which does {', '.join(expected[stage])} only"
    if not 0 <= group.number < group.groups or (group != ALL and op is not Op.WEIGHT_GRADIENTS):
        return f"{action} names a group that does not exist; weight gradients have groups, 0 to their number - 1"
    return None


def _out_of_turn(
    action: Action, checked: _Checked, expected: list[Op], done: set[Action], counts: dict[tuple[int, int], int]
) -> str | None:
    """Why an action of a place may not come yet, or not any more; None where it may.

    ``counts``: number of groups that weight gradients are made in, by stage and micro-batch.
    """
    op, stage, unit, group = action
    for need, why in _needs(action, checked, expected):
        if need not in done:
            return f"{action} needs {need} before it: {why}"
    if op is Op.WEIGHT_GRADIENTS:
        if counts.setdefault((stage, unit.micro_batch), group.groups) != group.groups:
            return f"{action} comes after others of its micro-batch that name another number of groups"
        earlier = (action._replace(unit=Unit(unit.micro_batch, index)) for index in range(unit.slice))
        made = next((each for each in earlier if each in done), None)
        if made is not None:
            return f"{action} comes after {made}, which has made them: those of later slices are made first"
    return None


def _needs(action: Action, checked: _Checked, expected: list[Op]) -> Iterator[tuple[Action, str]]:
    """The actions of the same place that must come first, each with the reason."""
    op, stage, unit, _ = action
    if op is Op.FORWARD:
        if unit.slice > 0:
            before = Unit(unit.micro_batch, unit.slice - 1)
            yield Action(op, stage, before), "slices of a micro-batch go forward in ascending order"
        if Op.RECV_FORWARD in expected:
            yield Action(Op.RECV_FORWARD, stage, unit), "it is the input"
        if checked.within(stage):
            yield Action(op, stage - 1, unit), "it makes the input"
    elif op is Op.BACKWARD:
        yield Action(Op.FORWARD, stage, unit), "a unit goes forward before it goes backward"
        if unit.slice < checked.slices[unit.micro_batch] - 1:
            after = Unit(unit.micro_batch, unit.slice + 1)
            yield Action(op, stage, after), "slices of a micro-batch go backward in descending order"
        if Op.RECV_BACKWARD in expected:
            yield Action(Op.RECV_BACKWARD, stage, unit), "it is the gradient of the output"
        if checked.within(stage + 1):
            yield Action(op, stage + 1, unit), "it makes the gradient of the output"
    elif op is Op.WEIGHT_GRADIENTS:
        yield Action(Op.BACKWARD, stage, unit), "it is the backward that they belong to"
    elif op is Op.SEND_FORWARD:
        yield Action(Op.FORWARD, stage, unit), "it is what is sent"
    elif op is Op.SEND_BACKWARD:
        yield Action(Op.BACKWARD, stage, unit), "it is what is sent"


def _check_channels(grid: Grid, where: Placement) -> None:
    """Check that both ends of each channel name the units, of which each is there once, in one order."""
    for stage, (sender, _, _) in enumerate(where.stages):
        for op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            sent = [(i, action) for i, action in enumerate(grid[sender]) if action.op is op and action.stage == stage]
            other = sent[0][1].counterpart if sent else None
            if other is None:
                continue
            receiver = where.place_of(other.stage)
            received = [(j, a) for j, a in enumerate(grid[receiver]) if (a.op, a.stage) == (other.op, other.stage)]
            for (i, send), (j, receive) in zip(sent, received, strict=True):
                if send.counterpart != receive:
                    problem = f"{receive} meets {send}: both stages must name the messages of a channel in one order"
                    raise _error(problem, grid, where, {sender: i, receiver: j})


def _run(grid: Grid, where: Placement) -> None:
    stuck = replay(grid, lambda action: 1, placement=where).stuck
    if stuck:
        notes = {place: f"waits for {grid[place][index].counterpart}" for place, index in stuck.items()}
        raise _error(f"deadlock: {_rows(stuck, where)} wait for ever", grid, where, stuck, notes)
    held = queue_deadlock(grid) or queue_deadlock(grid, posted_ahead=0)  # of the first step
    if held:
        problem = f"deadlock: {_rows(held, where)} wait for ever with CUDA_DEVICE_MAX_CONNECTIONS=1 (all streams share one queue)"
        raise _error(problem, grid, where, held, dict.fromkeys(held, "holds what was issued after it"))


def _rows(places: Iterable[int], where: Placement) -> str:
    return f"{row_word(where)}s " + ", ".join(map(str, sorted(places)))


def _check_bounds(grid: Grid, where: Placement, bounds: Sequence[int], name: str) -> None:
    for place, row in enumerate(grid):
        live = 0
        for i, action in enumerate(row):
            if where.goes_backward(action.stage):
                live += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            if live > bounds[place]:
                problem = f"{row_word(where)} {place} holds {live} live units, {name!r} holds {bounds[place]} at most"
                raise _error(problem, grid, where, {place: i})


def _error(
    problem: str, grid: Grid, where: Placement, at: Mapping[int, int], notes: Mapping[int, str] | None = None
) -> ScheduleError:
    notes = dict.fromkeys(at, problem) if notes is None else notes
    error, place = ScheduleError(f"schedule: {problem}\n{grid_text(grid, at, notes, where)}"), min(at)
    error.at = f"{row_word(where)} {place}, {grid[place][at[place]] if at[place] < len(grid[place]) else 'end'}"
    return error
