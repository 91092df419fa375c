"""Comparison of schedules: a table, a picture, and a ranking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ds_terapipe.commands.planning.alternatives import (
    UNSLICED,
    Alternative,
    alternatives_to,
    fits,
    peak_bytes,
    verdicts,
    whole_sequences,
)
from ds_terapipe.commands.planning.inputs import Inputs, choose_plan, shown_time
from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.memory import gigabytes
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.result import compact
from ds_terapipe.schedule import NAMES, Grid, Interval, Panel, Placement, Simulation, schedule_named


@dataclass(frozen=True)
class _Row:
    """A schedule of the table. ``schedule`` is its name in ``schedule.NAMES``, or ``interleaved``."""

    name: str
    schedule: str
    slices: tuple[int, ...]
    step_s: float
    bubble: float
    live_sequences: float
    peak_bytes: float | None
    fits: bool
    grid: Grid
    intervals: list[list[Interval]]
    placement: Placement | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "schedule": self.schedule,
            "slices": list(self.slices),
            "predicted_step_s": self.step_s,
            "bubble": self.bubble,
            "live_sequences": self.live_sequences,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def compare(inputs: Inputs, slices: tuple[int, ...] | None) -> tuple[list[str], dict[str, Any], list[Panel]]:
    """Compare all schedules for a step.

    Args:
        inputs: costs and sizes.
        slices: for both schedules that have some; None: the best for each.

    Returns:
        The printed lines, their figures, and a panel for each schedule.
    """
    request = inputs.request
    times = request.times(inputs.source.cost(inputs.sequences))
    alternatives, why_not = alternatives_to(inputs)
    rows = []
    if whole_sequences(inputs):
        rows.append(_row(inputs, times, "DeepSpeed's 1F1B, unsliced", UNSLICED, (request.seq_length,)))
    rows += [_interleaved_row(inputs, each, each.run) for each in alternatives if each.run is not None]
    sliced = []
    for schedule in NAMES:
        name, lengths = schedule_named(schedule).title, slices or _best_slices(inputs, schedule)
        sliced.append(_row(inputs, times, f"{name}, {len(lengths)} slices", schedule, lengths))
    rows += sliced
    best = min(sliced, key=lambda row: (not row.fits, row.step_s))
    said = verdicts(inputs, best.step_s, len(best.slices) > 1, alternatives, why_not)
    data = {
        "seq_length": request.seq_length,
        "stages": request.stages,
        "micro_batches": request.micro_batches,
        "sequences": inputs.sequences,
        "unit_costs": inputs.units,
        "costs": inputs.source.text,
        "schedules": [row.as_json() for row in rows],
        "alternatives": [each.as_json(best.step_s) for each in alternatives],
        "verdicts": said,
    }
    return [*inputs.lines, *_table(inputs, rows), *said], data, [_panel(inputs, row) for row in rows]


def _best_slices(inputs: Inputs, schedule: str) -> tuple[int, ...]:
    """Return the best that fit, else the best; the table marks those that do not fit."""
    try:
        return choose_plan(inputs, schedule).slices
    except ConfigError:
        unlimited = replace(inputs, request=replace(inputs.request, memory_gb=None))
        return choose_plan(unlimited, schedule).slices


def _row(inputs: Inputs, times: StepTimes, name: str, schedule: str, lengths: tuple[int, ...]) -> _Row:
    found = times.simulate(schedule, lengths)
    bytes_ = peak_bytes(inputs, schedule, lengths)
    live = max(place.peak_tokens for place in found.places) / inputs.request.seq_length * inputs.sequences
    return _Row(
        name, schedule, lengths, found.makespan + inputs.request.overhead_s, found.bubble, live, bytes_,
        fits(inputs, bytes_), found.grid, found.intervals, inputs.request.placement,
    )  # fmt: skip


def _interleaved_row(inputs: Inputs, other: Alternative, run: Simulation) -> _Row:
    return _Row(
        other.name, other.kind, (inputs.request.seq_length,), other.step_s, other.bubble, other.live_sequences,
        other.peak_bytes, other.fits, run.grid, run.intervals, other.placement,
    )  # fmt: skip


def _table(inputs: Inputs, rows: list[_Row]) -> list[str]:
    shown = shown_time(inputs.units)
    width = max(len(row.name) for row in rows) + 2
    lines = [
        f"{'schedule':<{width}}{'step':>12}{'speed':>8}{'bubble':>9}{'live seqs':>11}{'peak memory':>13}  slices, tokens"
    ]
    for row in rows:
        memory = "-" if row.peak_bytes is None else f"{gigabytes(row.peak_bytes):.2f} GB"
        note = "" if row.fits else "  does not fit into memory"
        speed = rows[0].step_s / row.step_s if row.step_s else 1.0
        lines.append(
            f"{row.name:<{width}}{shown(row.step_s):>12}{speed:>7.2f}x{row.bubble:>9.1%}{row.live_sequences:>11.2f}"
            f"{memory:>13}  {compact(row.slices)}{note}"
        )
    return lines


def _panel(inputs: Inputs, row: _Row) -> Panel:
    scale = 1.0 if inputs.units else 1e3
    intervals = [
        [Interval(scale * interval.start, scale * interval.end) for interval in each] for each in row.intervals
    ]
    return Panel(
        row.name if inputs.units else f"{row.name}, ms", row.grid, intervals=intervals, placement=row.placement
    )
