"""A schedule's timeline as an SVG picture: places down, time to the right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from .actions import Action, Grid, Op
from .placement import Placement, placement_of, row_word
from .replay import Interval
from .simulate import simulate
from .svg import COLOURS, DIGIT, RIGHT, document, legend

_LEFT, _TITLE, _PANEL_GAP, _LEGEND = 64, 30, 14, 34
_PALE = '{}" fill-opacity="0.72'


class Panel(NamedTuple):
    """One schedule of a picture.

    ``intervals`` are those of its actions, in any one unit: measured, or simulated. ``placement`` is that of the stages, None:
    one on each place.
    """

    title: str
    grid: Grid
    intervals: Sequence[Sequence[Interval]]
    placement: Placement | None = None

    @classmethod
    def of(
        cls, title: str, grid: Grid, durations: Callable[[Action], float], placement: Placement | None = None
    ) -> Panel:
        """Return the picture of a grid by the time of each computation; messages take none."""
        found = simulate(grid, durations, placement=placement)
        return cls(title, found.grid, found.intervals, placement)

    @property
    def makespan(self) -> float:
        """The time at which the last place ends."""
        return max((row[-1].end for row in self.intervals if row), default=0.0)


def timeline_svg(
    grid: Grid,
    durations: Callable[[Action], float],
    title: str = "",
    width: int = 960,
    placement: Placement | None = None,
) -> str:
    """The picture of one schedule; see `timelines_svg`.

    Args:
        grid: one list of actions per place, with or without messages.
        durations: time of each FORWARD and BACKWARD action. Messages take none.
        title: a line above the picture.
        width: of the picture, in pixels.
        placement: of the stages; None: one on each place.
    """
    return timelines_svg([Panel.of(title, grid, durations, placement)], width)


def timelines_svg(panels: Sequence[Panel], width: int = 960) -> str:
    """Schedules one above the other on one time scale, as the text of an SVG file.

    A colour is a micro-batch, light forward and dark backward. The number in a cell is the slice, or the micro-batch in
    a schedule that slices none; cells too narrow for it have none.
    """
    longest = max(panel.makespan for panel in panels) or 1.0
    scale = (width - _LEFT - RIGHT) / longest
    body: list[str] = []
    y = 8.0
    for panel in panels:
        drawn, height = _panel(panel, scale, y)
        body += drawn
        y += height + _PANEL_GAP
    y += _LEGEND - _PANEL_GAP
    weight_gradients = any(a.op is Op.WEIGHT_GRADIENTS for panel in panels for row in panel.grid for a in row)
    return document(width, y, [*body, *_legend(width, y - 14, weight_gradients)])


def _panel(panel: Panel, scale: float, top: float) -> tuple[list[str], float]:
    """The SVG elements of one schedule, and its height."""
    grid, makespan = panel.grid, panel.makespan
    places, word = len(grid), row_word(placement_of(len(grid), panel.placement))
    row, bar = (24, 21) if places <= 8 else (18, 16)
    end = _LEFT + makespan * scale
    computed = [
        [cell for cell in zip(actions, intervals, strict=True) if cell[0].op.is_compute]
        for actions, intervals in zip(grid, panel.intervals, strict=True)
    ]
    busy = sum(interval.end - interval.start for cells in computed for _, interval in cells)
    idle = 1 - busy / (places * makespan) if makespan else 0.0
    sliced = any(action.unit.slice > 0 for actions in grid for action in actions)
    caption = f"time {makespan:.4g}, {idle:.0%} idle"
    # Where the schedule ends, but clear of the title.
    caption_end = max(end, _LEFT + 8 * len(panel.title) + 7 * len(caption))
    out = [
        f'<text x="{_LEFT}" y="{top + 16:g}" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{caption_end:.1f}" y="{top + 16:g}" text-anchor="end" fill="#4b5563">{caption}</text>',
    ]
    for place, cells in enumerate(computed):
        y = top + _TITLE - 4 + place * row
        out.append(
            f'<text x="{_LEFT - 8}" y="{y + bar / 2 + 4:g}" text-anchor="end" fill="#4b5563">{word} {place}</text>'
            f'<rect x="{_LEFT}" y="{y:g}" width="{end - _LEFT:.2f}" height="{bar}" fill="#f3f4f6"/>'
        )
        for action, (start, stop) in cells:
            label = str(action.unit.slice if sliced else action.unit.micro_batch)
            out.append(_cell(action, label, _LEFT + start * scale, (stop - start) * scale, y, bar))
    bottom = top + _TITLE - 4 + places * row
    out.append(f'<path d="M{end:.2f} {top + _TITLE - 8:g}V{bottom:g}" stroke="#6b7280" stroke-dasharray="3 2"/>')
    return out, bottom - top


def _cell(action: Action, label: str, x: float, width: float, y: float, height: float) -> str:
    backward = action.op is not Op.FORWARD
    colour = COLOURS[action.unit.micro_batch % len(COLOURS)][backward]
    if action.op is Op.WEIGHT_GRADIENTS:
        colour, label = _PALE.format(colour), "W"
    gap = 1.0 if width > 4 else 0.0
    rect = f'<rect x="{x:.2f}" y="{y:g}" width="{max(width - gap, 0):.2f}" height="{height:g}" fill="{colour}"/>'
    size = min(height * 0.55, (width - gap) / (DIGIT * len(label)) * 0.9)
    if size < 7:
        return rect
    ink = "#ffffff" if backward else "#1f2937"
    return (
        f'{rect}<text x="{x + (width - gap) / 2:.2f}" y="{y + height / 2 + size * 0.36:.2f}" text-anchor="middle" '
        f'font-size="{size:.1f}" fill="{ink}">{label}</text>'
    )


def _legend(width: int, y: float, weight_gradients: bool) -> list[str]:
    items = [(COLOURS[0][0], "forward"), (COLOURS[0][1], "backward"), ("#f3f4f6", "idle")]
    if weight_gradients:
        items.insert(2, (_PALE.format(COLOURS[0][1]), "W: weight gradients"))
    remark = "colour: micro-batch; number: slice, or micro-batch where it is not sliced"
    return legend(items, remark, _LEFT, width, y)
