"""A schedule's grid as text, and its timeline as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .actions import Grid
from .timeline import timeline_svg, timelines_svg

__all__ = ["grid_text", "timeline_svg", "timelines_svg"]

_ALL_STAGES = 12  # a grid this narrow is shown with all its stages
_NEAR = 3  # rows, and stages of a wider grid, shown on either side of a marked cell


def grid_text(grid: Grid, at: Mapping[int, int] | None = None, notes: Mapping[int, str] | None = None) -> str:
    """The grid as text: a column for each stage, a row for each index into the stages' lists.

    A row is no moment in time: stages reach the same index at different times.

    Args:
        grid: one list of actions per stage.
        at: for each stage to mark, the index of the action it is at; the list's length or more means that it ended.
            Marked cells are in brackets and their rows end in ``<-- stage 1``. Only their neighbourhood is shown.
        notes: what to say after ``<-- stage 1: ``, for stages in ``at``.
    """
    at = {stage: min(max(index, 0), len(grid[stage])) for stage, index in (at or {}).items()}
    notes = notes or {}
    length = max((len(row) for row in grid), default=0)
    rows = _near(at.values(), length + 1) if at else range(length)
    stages = list(_near(at, len(grid)) if at and len(grid) > _ALL_STAGES else range(len(grid)))
    width = max([len(f"stage {len(grid)}"), *(len(str(action)) for row in grid for action in row)]) + 2

    lines = ["step  " + _columns({stage: f" stage {stage}" for stage in stages}, stages, width)]
    previous = -1
    for step in rows:
        cells = {stage: _cell(grid, stage, step, at.get(stage) == step) for stage in stages}
        marks = [f"stage {s}: {notes[s]}" if s in notes else f"stage {s}" for s in sorted(at) if at[s] == step]
        if not any(cells.values()):
            continue
        if step > previous + 1:
            lines.append(" ...")
        previous = step
        line = f"{step:4d}  " + _columns(cells, stages, width)
        lines.append(f"{line}  <-- {', '.join(marks)}" if marks else line)
    if previous + 1 < length:
        lines.append(" ...")
    return "\n".join(line.rstrip() for line in lines)


def _cell(grid: Grid, stage: int, step: int, marked: bool) -> str:
    text = str(grid[stage][step]) if step < len(grid[stage]) else ""
    return f"[{text or 'end'}]" if marked else text and f" {text}"


def _columns(cells: Mapping[int, str], stages: list[int], width: int) -> str:
    """The cells side by side; three dots stand for the stages left out."""
    text = ""
    previous = -1
    for stage in stages:
        if stage > previous + 1:
            text += "...  "
        previous = stage
        text += cells[stage].ljust(width + 1)
    return text


def _near(marked: Iterable[int], size: int) -> list[int]:
    return sorted({i for center in marked for i in range(center - _NEAR, center + _NEAR + 1) if 0 <= i < size})
