"""Comparison of schedules: a table, a picture, and a ranking."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ds_terapipe.commands.planning.alternatives import (
    UNSLICED,
    Row,
    alternatives_to,
    panel,
    row,
    verdicts,
    whole_sequences,
)
from ds_terapipe.commands.planning.inputs import Inputs, choose_plan, shown_time
from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.memory import gigabytes
from ds_terapipe.plan.result import compact
from ds_terapipe.schedule import NAMES, Panel, schedule_named


def compare(inputs: Inputs, slices: tuple[int, ...] | None) -> tuple[list[str], dict[str, Any], list[Panel]]:
    """Compare all schedules for a step.

    Args:
        inputs: costs and sizes.
        slices: for both schedules that have some; None: the best for each.

    Returns:
        The printed lines, their figures, and a panel for each schedule.
    """
    request = inputs.request
    alternatives, why_not = alternatives_to(inputs)
    rows = []
    if whole_sequences(inputs):
        rows.append(row(inputs, "DeepSpeed's 1F1B, unsliced", UNSLICED, (request.seq_length,)))
    rows += [each for each in alternatives if each.kind == "interleaved"]
    sliced = []
    for schedule in NAMES:
        lengths = slices or _best_slices(inputs, schedule)
        sliced.append(row(inputs, f"{schedule_named(schedule).title}, {len(lengths)} slices", schedule, lengths))
    rows += sliced
    best = min(sliced, key=lambda each: (not each.fits, each.step_s))
    said = verdicts(inputs, best.step_s, len(best.slices) > 1, alternatives, why_not)
    data = {
        "seq_length": request.seq_length,
        "stages": request.stages,
        "micro_batches": request.micro_batches,
        "sequences": inputs.sequences,
        "unit_costs": inputs.units,
        "costs": inputs.source.text,
        "schedules": [
            {"name": each.name, "schedule": each.kind, "slices": list(each.slices), **each.figures()} for each in rows
        ],
        "alternatives": [each.as_alternative(best.step_s) for each in alternatives],
        "verdicts": said,
    }
    panels = [panel(inputs, each.name, each.run, each.placement) for each in rows]
    return [*inputs.lines, *_table(inputs, rows), *said], data, panels


def _best_slices(inputs: Inputs, schedule: str) -> tuple[int, ...]:
    """Return the best that fit, else the best; the table marks those that do not fit."""
    try:
        return choose_plan(inputs, schedule).slices
    except ConfigError:
        unlimited = replace(inputs, request=replace(inputs.request, memory_gb=None))
        return choose_plan(unlimited, schedule).slices


def _table(inputs: Inputs, rows: list[Row]) -> list[str]:
    shown = shown_time(inputs.units)
    width = max(len(each.name) for each in rows) + 2
    lines = [
        f"{'schedule':<{width}}{'step':>12}{'speed':>8}{'bubble':>9}{'live seqs':>11}{'peak memory':>13}  slices, tokens"
    ]
    for each in rows:
        memory = "-" if each.peak_bytes is None else f"{gigabytes(each.peak_bytes):.2f} GB"
        note = "" if each.fits else "  does not fit into memory"
        speed = rows[0].step_s / each.step_s if each.step_s else 1.0
        lines.append(
            f"{each.name:<{width}}{shown(each.step_s):>12}{speed:>7.2f}x{each.run.bubble:>9.1%}{each.live_sequences:>11.2f}"
            f"{memory:>13}  {compact(each.slices)}{note}"
        )
    return lines
