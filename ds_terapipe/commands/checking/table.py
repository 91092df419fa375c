"""The table of a checked launch: a line for each stage, or for several that are alike in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ds_terapipe.commands.checking.planned import Outcome
from ds_terapipe.commands.checking.rank import Report
from ds_terapipe.plan.costs.memory import MemoryUse, gigabytes
from ds_terapipe.plan.result import quantity

_COLUMNS = ("layers", "parameters", "weights", "gradients", "optimiser", "activations", "buffers", "peak")
COMPUTED = "~"  # before a figure that fake tensors could not give
_UNKNOWN = "?"


def table(reports: Sequence[Report], outcome: Outcome) -> list[str]:
    """Return the lines: sizes of the launch, the table in GB, what its marks mean, the plan."""
    first = reports[0]
    length = _UNKNOWN if first.length is None else first.length
    lines = [
        f"launch: {_sizes(first)} x {first.tensor} tensor-parallel x {first.replicas} replicas = "
        f"{len(first.ranks) * first.tensor * first.replicas} ranks",
        f"step: {quantity(first.micro_batches, 'micro-batch')} of {first.sequences} x {length} tokens on each replica",
    ]
    rows = [_cells(here, use) for here, use in _places(reports, outcome)]
    lines += _aligned([(outcome.row, *_COLUMNS), *_together(rows)])
    lines.append(
        "GB (1e9 bytes) of a rank; activations: of live units, keys and values, and what weight gradients wait for"
    )
    if any(report.by_rule or report.counted is None for report in reports):
        lines.append(f"{COMPUTED}: computed, for fake tensors cannot run it")
    notes = Counter((note, report.stage) for report in reports for note in report.notes)
    for note in dict.fromkeys(note for note, _ in notes):
        stages = sorted(stage for each, stage in notes if each == note)
        lines.append(f"stage{'s' if len(stages) > 1 else ''} {_ranges(stages)}: {note}")
    return [*lines, *outcome.lines]


def as_json(reports: Sequence[Report], outcome: Outcome) -> dict[str, Any]:
    """Return the figures, in bytes."""
    rows = []
    for here, use in _places(reports, outcome):
        rows.append(
            {
                outcome.row: here[0].place,
                "layers": [name for report in here for name in report.layers],
                "parameters": here[0].parameters,
                **here[0].kept._asdict(),
                **_figures(use),
                "computed": ["kept"] * here[0].by_rule + ["tokens"] * any(report.counted is None for report in here),
                "notes": [*dict.fromkeys(note for report in here for note in report.notes)],
            }
        )
    return {
        f"{outcome.row}s": rows,
        "slices": list(outcome.lengths),
        "schedule": outcome.schedule,
        "plan": None if outcome.plan is None else outcome.plan.to_dict(),
    }


def _places(reports: Sequence[Report], outcome: Outcome) -> Iterator[tuple[list[Report], MemoryUse | None]]:
    """Yield the reports of each place's stages, and the memory of the place; None where it is not known."""
    for place in range(len(reports[0].ranks)):
        here = [report for report in reports if report.place == place]
        yield here, outcome.uses[place] if outcome.uses else None


def _sizes(report: Report) -> str:
    places, stages = len(report.ranks), report.stages
    return f"{stages} stages" if places == stages else f"{places} places of {stages // places} stages"


def _figures(use: MemoryUse | None) -> dict[str, float | None]:
    """Return the bytes of a step at its peak."""
    if use is None:
        return dict.fromkeys(("activations", "buffers", "peak"))
    activations = use.activations + use.keys_values + use.key_value_gradients + use.weight_gradients
    return {"activations": activations, "buffers": use.messages + use.working, "peak": use.total}


def _cells(here: Sequence[Report], use: MemoryUse | None) -> tuple[str, ...]:
    report, uncounted = here[0], any(each.counted is None for each in here)
    kept, tokens = COMPUTED * report.by_rule, COMPUTED * uncounted
    known = not uncounted or report.sizes is not None
    marks = (*[kept] * len(report.kept), tokens, tokens, kept or tokens)
    figures = zip(marks, (*report.kept, *_figures(use if known else None).values()), strict=True)
    return (
        " + ".join(_names(each.layers) for each in here),
        f"{report.parameters:,}",
        *(_UNKNOWN if value is None else f"{mark}{_text(gigabytes(value))}" for mark, value in figures),
    )


def _text(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.3g}"


def _names(layers: Sequence[str]) -> str:
    """Class names in order, equal neighbours counted: ``Embedding, 3 GPTLayer``."""
    runs = ((name, len(list(same))) for name, same in groupby(layers))
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in runs)


def _together(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for neighbouring stages with the same cells."""
    found = []
    for cells, same in groupby(enumerate(rows), key=lambda row: row[1]):
        stages = [stage for stage, _ in same]
        found.append((_ranges(stages), *cells))
    return found


def _ranges(stages: Sequence[int]) -> str:
    runs = (list(same) for _, same in groupby(enumerate(stages), key=lambda each: each[1] - each[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if n < 2 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
