"""Comparison of schedules: a table, a picture, and a ranking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ds_terapipe.commands.planning.alternatives import UNSLICED, Row, alternatives_to, panel, row, verdicts
from ds_terapipe.commands.planning.inputs import AUTO, Inputs, choose_plan, plan_if_fits, shown_time
from ds_terapipe.commands.planning.several import placements, unplaced
from ds_terapipe.plan.costs.memory import gigabytes
from ds_terapipe.plan.improve import improve, why_not
from ds_terapipe.plan.result import compact
from ds_terapipe.schedule import SEARCHED, Panel, Schedule, names_on, schedule_named
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
    request, plain = inputs.request, unplaced(inputs)
    alternatives, why_not = alternatives_to(plain or inputs)
    rows = []
    if request.allows((request.seq_length,)):
        title = "1F1B, unsliced" if plain is None else "DeepSpeed's 1F1B, unsliced"
        rows.append(row(plain or inputs, title, UNSLICED, (request.seq_length,)))
    rows += [each for each in alternatives if each.kind == "interleaved"]
    sliced = []
    for schedule in names_on(request.placement):
        lengths = slices or _best_slices(inputs, schedule)
        title = schedule_named(schedule).title or f"slice-level {schedule}"
        sliced.append(row(inputs, f"{title}, {len(lengths)} slices", schedule, lengths))
    sliced += _placed(inputs, slices, search_s)
    rows += sliced
    best = min(sliced, key=lambda each: (not each.fits, each.step_s))
    said = verdicts(inputs, best.step_s, len(best.slices) > 1, alternatives, why_not)
    data = {
        **inputs.figures,
        "schedules": [
            {"name": each.name, "schedule": each.kind, "slices": list(each.slices), **each.figures()} for each in rows
        ],
        "alternatives": [each.as_alternative(best.step_s) for each in alternatives],
        "verdicts": said,
    }
    panels = [panel(inputs, each.name, each.run, each.placement) for each in rows]
    return [*inputs.lines, *_table(inputs, rows), *said], data, panels


def _placed(inputs: Inputs, slices: tuple[int, ...] | None, search_s: float) -> Iterator[Row]:
    """Yield rows of two stages on each place, and of searched orders on each placement where they are worth it.

    A searched order may have slices of its own where none are given.
    """
    there = {"": inputs, **{f", {name}": on for name, on in placements(inputs).items()}}
    for name, on in there.items():
        request = replace(on.request, search_s=search_s / len(there))
        schedule, lengths = ZERO_BUBBLE.name, slices
        found: tuple[str | Schedule, tuple[int, ...]] | None = None
        if lengths is None:
            plan = plan_if_fits(on, AUTO, request.search_s)
            if plan is None:
                continue
            found = None if plan.order is None else (plan.runs, plan.slices)
            named = plan if plan.order is None else min(plan.losing, key=lambda each: (not each.fits, each.step_s))
            schedule, lengths = named.schedule, named.slices
        elif search_s and not why_not(times := request.times(on.cost), schedule, lengths):
            better = improve(times, request, schedule, [lengths])
            found = None if better is None else (better.runs, lengths)
        if name:
            yield row(on, f"{schedule}{name}, 2 stages a place, {len(lengths)} slices", schedule, lengths)
        if found is not None:
            yield row(on, f"{SEARCHED}{name}, {len(found[1])} slices", *found)


def _best_slices(inputs: Inputs, schedule: str) -> tuple[int, ...]:
    """Return the best that fit, else the best; the table marks those that do not fit."""
    unlimited = replace(inputs, request=replace(inputs.request, memory_gb=None))
    return (plan_if_fits(inputs, schedule) or choose_plan(unlimited, schedule)).slices


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
