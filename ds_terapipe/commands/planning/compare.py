"""Comparison of schedules: a table, a picture, and a ranking."""

from __future__ import annotations

from contextlib import suppress
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
from ds_terapipe.commands.planning.inputs import AUTO, Inputs, choose_plan, shown_time
from ds_terapipe.commands.planning.several import placed, placements
from ds_terapipe.errors import ConfigError
from ds_terapipe.plan.costs.memory import gigabytes
from ds_terapipe.plan.result import compact
from ds_terapipe.schedule import NAMES, Panel, schedule_named
from ds_terapipe.schedule.orders import ZERO_BUBBLE


def compare(
    inputs: Inputs, slices: tuple[int, ...] | None, search_s: float = 0.0
) -> tuple[list[str], dict[str, Any], list[Panel]]:
    """Compare all schedules for a step.

    Args:
        inputs: costs and sizes.
        slices: for all schedules that have some; None: the best for each.
        search_s: seconds of the search for other orders.

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
    sliced += _placed(inputs, slices)
    sliced += _searched(inputs, search_s)
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


def _placed(inputs: Inputs, slices: tuple[int, ...] | None) -> list[Row]:
    """Return rows of the same slices on two stages a place: filled waits, or what stands in for them."""
    found = []
    for name, placement in placements(inputs).items():
        there = placed(inputs, placement)
        assert there is not None  # its costs are known
        lengths = slices or _best_slices(there, ZERO_BUBBLE.name)
        title = f"{ZERO_BUBBLE.name}, {name}, 2 stages a place, {len(lengths)} slices"
        found.append(row(there, title, ZERO_BUBBLE.name, lengths))
    return found


def _searched(inputs: Inputs, search_s: float) -> list[Row]:
    """Return a row for each placement on which a search finds an order that is worth it; it may take other slices."""
    there = {"": inputs, **{f", {name}": placed(inputs, each) for name, each in placements(inputs).items()}}
    found = []
    for name, on in there.items():
        with suppress(ConfigError):  # it does not fit
            plan = None if on is None else choose_plan(on, AUTO, search_s / len(there))
            if on is not None and plan is not None and plan.order is not None:
                found.append(row(on, f"searched{name}, {len(plan.slices)} slices", plan.runs, plan.slices))
    return found


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
