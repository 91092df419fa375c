"""Summary of a trace by stage: busy, waiting and for which rank, and the share of the step that is bubble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_terapipe.tracing.chrome import Event


class StageSummary(NamedTuple):
    """Seconds per step of one rank, over the traced steps.

    ``busy`` is computation (F, B, W), ``waiting`` what its receives took, by the stage waited for, ``collectives`` what ends a
    step (gradient reduction, optimiser, loss), by name, ``other`` the rest: cutting, posting sends, Python. ``bubble`` is the
    share of the schedule, from the step's first action on any stage to its last, that is neither computation nor messages
    posted.
    """

    run: str
    rank: int
    stage: int
    steps: int
    schedule: float
    busy: float
    waiting: dict[int, float]
    collectives: dict[str, float]
    other: float
    bubble: float


def summarise(events: Sequence[Event]) -> list[StageSummary]:
    """One line per run and rank, in that order."""
    frames: dict[tuple[str, int], tuple[float, float]] = {}
    for event in events:
        if event.action is not None:
            first, last = frames.get((event.run, event.step), (event.start, event.end))
            frames[event.run, event.step] = (min(first, event.start), max(last, event.end))
    by_rank: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        by_rank.setdefault((event.run, event.rank), []).append(event)
    return [_summary(run, rank, mine, frames) for (run, rank), mine in sorted(by_rank.items())]


def _summary(
    run: str, rank: int, events: Sequence[Event], frames: dict[tuple[str, int], tuple[float, float]]
) -> StageSummary:
    steps = {event.step for event in events if (run, event.step) in frames}
    count = max(len(steps), 1)
    schedule = sum(frames[run, step][1] - frames[run, step][0] for step in steps) / count
    busy = 0.0
    waiting: dict[int, float] = {}
    collectives: dict[str, float] = {}
    for event in events:
        if (action := event.action) is None:
            collectives[event.name] = collectives.get(event.name, 0.0) + event.seconds / count
        elif action.op.is_compute:
            busy += event.seconds / count
        elif action.op.is_receive and (sender := action.counterpart):
            peer = sender.stage
            waiting[peer] = waiting.get(peer, 0.0) + event.seconds / count
    own = sum(end - start for start, end in (_own_frame(events, step) for step in steps)) / count
    other = max(own - busy - sum(waiting.values()), 0.0)
    bubble = max(schedule - busy - other, 0.0) / schedule if schedule else 0.0
    stage = events[0].stage
    return StageSummary(run, rank, stage, len(steps), schedule, busy, waiting, collectives, other, bubble)


def _own_frame(events: Sequence[Event], step: int) -> tuple[float, float]:
    """From a rank's first action to its last."""
    mine = [event for event in events if event.step == step and event.action is not None]
    return (min(event.start for event in mine), max(event.end for event in mine)) if mine else (0.0, 0.0)


def as_table(lines: Sequence[StageSummary]) -> str:
    """The summaries as text, a line each, times in milliseconds."""
    out = [
        f"{'run':<10}{'rank':>5}{'stage':>6}{'steps':>6}{'schedule':>10}{'busy':>10}{'bubble':>8}  waiting for, ms; besides, ms"
    ]
    for line in lines:
        waits = (
            ", ".join(f"stage {peer} {1e3 * seconds:.1f}" for peer, seconds in sorted(line.waiting.items()))
            or "no stage"
        )
        besides = {**line.collectives, "other": line.other}
        after = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in besides.items())
        out.append(
            f"{line.run:<10}{line.rank:>5}{line.stage:>6}{line.steps:>6}{1e3 * line.schedule:>10.1f}"
            f"{1e3 * line.busy:>10.1f}{line.bubble:>8.1%}  {waits}; {after}"
        )
    return "\n".join(out)
