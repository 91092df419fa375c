"""A schedule's grid as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .actions import Grid
from .placement import Placement, placement_of, row_word

_ALL_PLACES = 12  # a grid this narrow is shown with all its places
_NEAR = 3  # rows, and places of a wider grid, shown on either side of a marked cell


def grid_text(
    grid: Grid,
    at: Mapping[int, int] | None = None,
    notes: Mapping[int, str] | None = None,
    placement: Placement | None = None,
) -> str:
    """The grid as text: a column for each place, a row for each index into the places' lists.

    A row is no moment in time: places reach the same index at different times. Where each place has one stage, in their order,
    the columns are called stages.

    Args:
        grid: one list of actions per place.
        at: for each place to mark, the index of the action it is at; the list's length or more means that it ended.
            Marked cells are in brackets and their rows end in ``<-- stage 1``. Only their neighbourhood is shown.
        notes: text after ``<-- stage 1: ``, for places in ``at``.
        placement: of the stages; None: one on each place.
    """
    word = row_word(placement_of(len(grid), placement))
    at = {place: min(max(index, 0), len(grid[place])) for place, index in (at or {}).items()}
    notes = notes or {}
    length = max(map(len, grid))
    rows = _near(at.values(), length + 1) if at else range(length)
    places = list(_near(at, len(grid)) if at and len(grid) > _ALL_PLACES else range(len(grid)))
    width = max([len(f"{word} {len(grid)}"), *(len(str(action)) for row in grid for action in row)]) + 2

    lines = ["step  " + _columns({place: f" {word} {place}" for place in places}, places, width)]
    previous = -1
    for step in rows:
        cells = {place: _cell(grid, place, step, at.get(place) == step) for place in places}
        marks = [f"{word} {p}: {notes[p]}" if p in notes else f"{word} {p}" for p in sorted(at) if at[p] == step]
        if not any(cells.values()):
            continue
        if step > previous + 1:
            lines.append(" ...")
        previous = step
        line = f"{step:4d}  " + _columns(cells, places, width)
        lines.append(f"{line}  <-- {', '.join(marks)}" if marks else line)
    if previous + 1 < length:
        lines.append(" ...")
    return "\n".join(line.rstrip() for line in lines)


def _cell(grid: Grid, place: int, step: int, marked: bool) -> str:
    text = str(grid[place][step]) if step < len(grid[place]) else ""
    return f"[{text or 'end'}]" if marked else text and f" {text}"


def _columns(cells: Mapping[int, str], places: list[int], width: int) -> str:
    """The cells side by side; three dots stand for the places left out."""
    text = ""
    previous = -1
    for place in places:
        if place > previous + 1:
            text += "...  "
        previous = place
        text += cells[place].ljust(width + 1)
    return text


def _near(marked: Iterable[int], size: int) -> list[int]:
    return sorted({i for center in marked for i in range(center - _NEAR, center + _NEAR + 1) if 0 <= i < size})
