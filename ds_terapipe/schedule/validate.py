"""Proves that a whole schedule can run, and runs right, before any process starts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .actions import Action, Grid, Op, Unit
from .lower import has_messages, with_messages
from .orders import peak_live_units
from .render import grid_text
from .replay import Replay, replay
from .streams import stream_deadlock


class ScheduleError(ValueError):
    """A schedule that breaks a rule. The message is the rule, then the grid around the bad cell, marked ``<-- ...``."""


def validate(grid: Grid, slices: Sequence[int], name: str | None = None) -> None:
    """Checks a schedule for all stages at once.

    - Each stage runs every unit once forward and, in training, once backward; forward before backward; the slices of a
      micro-batch ascending forward and descending backward.
    - Each input is received before its computation and each result sent after it, once; both ends of a channel (one
      direction between two neighbours) name the units in one order.
    - No stage waits for ever: neither where sends are buffered and receives wait, nor where a channel's messages run one
      behind the other and few may wait to be taken (`streams`).
    - Weight gradients of their own, where there are any, come once per micro-batch and stage, after its last backward.
    - The peak of live units on each stage is the one predicted for the schedule's name.

    A grid without any message is a compute order: it is checked as `lower.with_messages` completes it. In a grid with
    messages all of them must be there.

    Args:
        grid: one list of actions per stage, with or without messages.
        slices: number of slices of each micro-batch.
        name: ``"terapipe"``, ``"1f1b"`` or ``"forward_only"``. Without a name the peak is not checked, and a grid that
            has no BACKWARD at all passes as forward-only.

    Raises:
        ScheduleError: a rule is broken.
        ValueError: unknown name, no micro-batch, or a micro-batch without slices.
    """
    if not slices or min(slices) < 1:
        raise ValueError(f"slices: got {list(slices)}, must list one positive number of slices for each micro-batch")
    predicted = None if name in (None, "forward_only") else peak_live_units(name, max(1, len(grid)), slices)
    ran_backward = any(action.op is Op.BACKWARD for row in grid for action in row)
    training = predicted is not None or (name is None and ran_backward)
    lowered = has_messages(grid) or len(grid) == 1  # one stage sends nothing
    if not grid:
        raise ScheduleError("schedule: got no stages, must have at least one")
    for stage in range(len(grid)):
        _check_stage(grid, stage, slices, training, lowered)
    complete: Grid = grid if lowered else with_messages(grid)
    _check_channels(complete)
    _run(complete)
    if predicted is not None:
        _check_peaks(grid, predicted)


def dry_run(grid: Grid) -> int:
    """Number of time steps that the schedule takes if each computation takes one and messages none.

    Args:
        grid: one list of actions per stage; messages are put in where it has none.

    Raises:
        ScheduleError: some stages would wait for ever.
    """
    complete: Grid = grid if has_messages(grid) or len(grid) == 1 else with_messages(grid)
    return round(_run(complete).makespan)


def _check_stage(grid: Grid, stage: int, slices: Sequence[int], training: bool, lowered: bool) -> None:
    """Everything that can be said about one stage alone."""
    expected = _expected_ops(stage, len(grid), training, lowered)
    if any(action.op is Op.WEIGHT_GRADIENTS for row in grid for action in row):
        expected.append(Op.WEIGHT_GRADIENTS)
    done: dict[Op, set[Unit]] = {op: set() for op in Op}
    for index, action in enumerate(grid[stage]):
        problem = _misplaced(action, stage, slices, expected)
        if problem is None and action.unit in done[action.op]:
            problem = f"{action} is there a second time"
        if problem is None:
            missing = [need for need in _needs(action, slices, expected) if need[0].unit not in done[need[0].op]]
            problem = f"{action} needs {missing[0][0]} before it: {missing[0][1]}" if missing else None
        if problem is not None:
            raise _error(problem, grid, {stage: index})
        done[action.op].add(action.unit)
    units = [Unit(m, i) for m, count in enumerate(slices) for i in range(count)]
    wanted = [(op, unit) for op in expected for unit in units if op is not Op.WEIGHT_GRADIENTS or unit.slice == 0]
    absent = [Action(op, stage, unit) for op, unit in wanted if unit not in done[op]]
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise _error(f"{absent[0]} is missing{more}", grid, {stage: len(grid[stage])})


def _expected_ops(stage: int, stages: int, training: bool, lowered: bool) -> list[Op]:
    """The operations that a stage does once for every unit."""
    ops = [Op.FORWARD]
    if lowered:
        ops += [Op.RECV_FORWARD] * (stage > 0) + [Op.SEND_FORWARD] * (stage < stages - 1)
    if training:
        ops += [Op.BACKWARD]
    if training and lowered:
        ops += [Op.RECV_BACKWARD] * (stage < stages - 1) + [Op.SEND_BACKWARD] * (stage > 0)
    return ops


def _misplaced(action: Action, stage: int, slices: Sequence[int], expected: list[Op]) -> str | None:
    unit = action.unit
    if action.stage != stage:
        return f"{action} belongs to stage {action.stage}"
    if not (0 <= unit.micro_batch < len(slices) and 0 <= unit.slice < slices[unit.micro_batch]):
        return f"{action} names a unit that does not exist; slices of the micro-batches: {list(slices)}"
    if action.op is Op.WEIGHT_GRADIENTS and unit.slice != 0:
        return f"{action} names a slice; the weight gradients of a whole micro-batch name slice 0"
    if action.op not in expected:
        return f"{action} has no place on stage {stage}, which does {', '.join(expected)} only"
    return None


def _needs(action: Action, slices: Sequence[int], expected: list[Op]) -> Iterator[tuple[Action, str]]:
    """The actions of the same stage that must come first, each with the reason."""
    op, stage, unit = action
    if op is Op.FORWARD:
        if unit.slice > 0:
            before = Unit(unit.micro_batch, unit.slice - 1)
            yield Action(op, stage, before), "slices of a micro-batch go forward in ascending order"
        if Op.RECV_FORWARD in expected:
            yield Action(Op.RECV_FORWARD, stage, unit), "it is the input"
    elif op is Op.BACKWARD:
        yield Action(Op.FORWARD, stage, unit), "a unit goes forward before it goes backward"
        if unit.slice < slices[unit.micro_batch] - 1:
            after = Unit(unit.micro_batch, unit.slice + 1)
            yield Action(op, stage, after), "slices of a micro-batch go backward in descending order"
        if Op.RECV_BACKWARD in expected:
            yield Action(Op.RECV_BACKWARD, stage, unit), "it is the gradient of the output"
    elif op is Op.WEIGHT_GRADIENTS:
        yield Action(Op.BACKWARD, stage, unit), "it is the last backward of the micro-batch"
    elif op is Op.SEND_FORWARD:
        yield Action(Op.FORWARD, stage, unit), "it is what is sent"
    elif op is Op.SEND_BACKWARD:
        yield Action(Op.BACKWARD, stage, unit), "it is what is sent"


def _check_channels(grid: Grid) -> None:
    """Both ends of each channel must name the units in one order. That each unit is there once is known already."""
    for sender, row in enumerate(grid):
        for op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            sent = [(i, action) for i, action in enumerate(row) if action.op is op]
            other = sent[0][1].counterpart if sent else None
            if other is None:
                continue
            received = [(i, action) for i, action in enumerate(grid[other.stage]) if action.op is other.op]
            for (i, send), (j, receive) in zip(sent, received, strict=True):
                if send.counterpart != receive:
                    problem = f"{receive} meets {send}: both stages must name the messages of a channel in one order"
                    raise _error(problem, grid, {sender: i, other.stage: j})


def _run(grid: Grid) -> Replay:
    result = replay(grid, lambda action: 1)
    stuck = result.stuck or stream_deadlock(grid)
    if stuck:
        notes = {stage: f"waits for {grid[stage][index].counterpart}" for stage, index in stuck.items()}
        names = ", ".join(str(stage) for stage in sorted(stuck))
        raise _error(f"deadlock: stages {names} wait for ever", grid, stuck, notes)
    return result


def _check_peaks(grid: Grid, predicted: Sequence[int]) -> None:
    for stage, row in enumerate(grid):
        live = peak = index = 0
        for i, action in enumerate(row):
            live += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            if live > peak:
                peak, index = live, i
        if peak != predicted[stage]:
            problem = f"stage {stage} holds up to {peak} live units, the schedule is known to hold {predicted[stage]}"
            raise _error(problem, grid, {stage: index})


def _error(problem: str, grid: Grid, at: Mapping[int, int], notes: Mapping[int, str] | None = None) -> ScheduleError:
    notes = dict.fromkeys(at, problem) if notes is None else notes
    return ScheduleError(f"schedule: {problem}\n{grid_text(grid, at, notes)}")
