"""A schedule's timeline as an SVG picture: places down, time to the right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from .actions import Action, Grid, Op
from .lower import has_messages, with_messages
from .placement import Placement, placement_of, row_word
from .replay import Interval, Replay, replay
from .svg import COLOURS, DIGIT, RIGHT, document, legend

_LEFT, _TITLE, _PANEL_GAP, _LEGEND = 64, 30, 14, 34
_PALE = '{}" fill-opacity="0.72'


class Panel(NamedTuple):
    """One schedule of a picture.

    ``durations`` gives the time of each FORWARD, BACKWARD and WEIGHT_GRADIENTS action, in any one unit; where ``intervals`` are
    given, measured or simulated, they are drawn as they are and ``durations`` is not asked. ``placement`` is that of the
    stages, None: one on each place.
    """

    title: str
    grid: Grid
    durations: Callable[[Action], float] | None = None
    intervals: Sequence[Sequence[Interval]] | None = None
    placement: Placement | None = None


class _Timed(NamedTuple):
    panel: Panel
    grid: Grid
    result: Replay


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
    return timelines_svg([Panel(title, grid, durations, placement=placement)], width)


def timelines_svg(panels: Sequence[Panel], width: int = 960) -> str:
    """Schedules one above the other on one time scale, as the text of an SVG file.

    A colour is a micro-batch, light forward and dark backward. The number in a cell is the slice, or the micro-batch in
    a schedule that slices none; cells too narrow for it have none.

    Raises:
        ValueError: no panel, or a schedule in which places would wait for ever.
    """
    if not panels:
        raise ValueError("timelines_svg: got no panels, must have at least one")
    timed = [_time(panel) for panel in panels]
    longest = max(t.result.makespan for t in timed) or 1.0
    scale = (width - _LEFT - RIGHT) / longest
    body: list[str] = []
    y = 8.0
    for t in timed:
        drawn, height = _panel(t, scale, y)
        body += drawn
        y += height + _PANEL_GAP
    y += _LEGEND - _PANEL_GAP
    weight_gradients = any(a.op is Op.WEIGHT_GRADIENTS for t in timed for row in t.grid for a in row)
    return document(width, y, [*body, *_legend(width, y - 14, weight_gradients)])


def _time(panel: Panel) -> _Timed:
    if panel.intervals is not None:
        return _Timed(panel, panel.grid, Replay([list(row) for row in panel.intervals], {}))
    if panel.durations is None:
        raise ValueError(f"timeline: panel {panel.title!r} has neither durations nor intervals, must have one of them")
    where = placement_of(len(panel.grid), panel.placement)
    grid = panel.grid if has_messages(panel.grid) else with_messages(panel.grid, where)
    result = replay(grid, panel.durations, placement=where)
    if result.stuck:
        places = ", ".join(str(place) for place in result.stuck)
        raise ValueError(
            f"timeline: {row_word(where)}s {places} would wait for ever, must be a schedule that validate() accepts"
        )
    return _Timed(panel, grid, result)


def _panel(timed: _Timed, scale: float, top: float) -> tuple[list[str], float]:
    """The SVG elements of one schedule, and its height."""
    grid, result = timed.grid, timed.result
    places, word = len(grid), row_word(placement_of(len(grid), timed.panel.placement))
    row, bar = (24, 21) if places <= 8 else (18, 16)
    end = _LEFT + result.makespan * scale
    computed = [
        [cell for cell in zip(actions, intervals, strict=True) if cell[0].op.is_compute]
        for actions, intervals in zip(grid, result.intervals, strict=True)
    ]
    busy = sum(interval.end - interval.start for cells in computed for _, interval in cells)
    idle = 1 - busy / (places * result.makespan) if result.makespan else 0.0
    sliced = any(action.unit.slice > 0 for actions in grid for action in actions)
    caption = f"time {result.makespan:.4g}, {idle:.0%} idle"
    # Where the schedule ends, but clear of the title.
    caption_end = max(end, _LEFT + 8 * len(timed.panel.title) + 7 * len(caption))
    out = [
        f'<text x="{_LEFT}" y="{top + 16:g}" font-weight="bold">{escape(timed.panel.title)}</text>',
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
