"""Draws accuracy over seconds of training, a panel for each table of Markdown that has columns ``seconds`` and ``dev, %``.

``python -m tests.benchmarks.elastic_finetune_picture docs/benchmarks.md --output docs/finetune.svg``: a point for each
row, the end of its training, with bars of a standard deviation to each side. What the fine-tuning benchmark prints
has such a table.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ds_terapipe.schedule.svg import COLOURS, GREY, INK, RIGHT, document

_PANEL, _HIGH, _LEFT, _TOP, _AXIS, _LINE = 400, 220, 46, 46, 40, 18


class Point(NamedTuple):
    """A row: seconds and accuracy, and their standard deviations, zero of a single run."""

    title: str
    x: float
    y: float
    dx: float
    dy: float


def panels_of(text: str) -> list[tuple[str, list[Point]]]:
    """(title, points) of each table, numbered under its heading."""
    found: list[tuple[str, list[Point]]] = []
    heading = ""
    for block in text.split("\n\n"):
        if block.startswith("#"):
            heading = block.strip("# ")
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
        if rows and {"seconds", "dev, %"} <= set(rows[0]):
            title = f"{heading}, table {sum(one.startswith(heading) for one, _ in found) + 1}"
            found.append((title, [_point(dict(zip(rows[0], row, strict=True))) for row in rows[2:]]))
    return found


def _point(row: Mapping[str, str]) -> Point:
    """Cells are ``mean ± standard deviation``, or the figure of a single run."""
    (x, dx, *_), (y, dy, *_) = ([*map(float, re.findall(r"[\d.]+", row[name])), 0.0] for name in ("seconds", "dev, %"))
    return Point(row[""], x, y, dx, dy)


def accuracy_svg(panels: Sequence[tuple[str, list[Point]]]) -> str:
    """The picture, as the text of an SVG file."""
    titles = dict.fromkeys(point.title for _, points in panels for point in points)
    colours = {title: dark for title, (_, dark) in zip(titles, COLOURS, strict=False)}
    body = [line for number, panel in enumerate(panels) for line in _panel(number * _PANEL, *panel, colours)]
    bottom = _TOP + _HIGH + _AXIS
    for place, (title, colour) in enumerate(colours.items()):
        y = bottom + _LINE * (place + 1) - 6
        body.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        body.append(_text(_LEFT + 18, y, title))
    return document(len(panels) * _PANEL, bottom + _LINE * len(colours) + 8, body)


def _panel(left: float, title: str, points: Sequence[Point], colours: Mapping[str, str]) -> list[str]:
    right = max(point.x + point.dx for point in points)
    lowest, highest = min(point.y - point.dy for point in points), max(point.y + point.dy for point in points)
    step_x, step_y = _step(right), _step(highest - lowest)
    low, high = math.floor(lowest / step_y) * step_y, math.ceil(highest / step_y) * step_y

    def at(x: float, y: float) -> tuple[float, float]:
        return left + _LEFT + (_PANEL - _LEFT - RIGHT) * x / right, _TOP + _HIGH * (high - y) / (high - low)

    (begin, floor), (end, _) = at(0, low), at(right, low)
    out = [_text(begin, 18, title, INK, weight="bold")]
    for number in range(round((high - low) / step_y) + 1):
        _, y = at(0, low + number * step_y)
        out.append(f'<path d="M{begin:.1f} {y:.1f}H{end:.1f}" stroke="#e5e7eb"/>')
        out.append(_text(begin - 6, y + 4, f"{low + number * step_y:g}", anchor="end"))
    for number in range(int(right / step_x) + 1):
        out.append(_text(at(number * step_x, low)[0], floor + 16, f"{number * step_x:g}", anchor="middle"))
    out.append(_text(end, floor + 32, "seconds of training", anchor="end"))
    out.append(_text(begin, _TOP - 12, "accuracy on dev, %"))
    for name, x, y, dx, dy in points:
        for bar in [((x - dx, y), (x + dx, y))] * (dx > 0) + [((x, y - dy), (x, y + dy))] * (dy > 0):
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*corner) for corner in bar))
            out.append(f'<path d="M{path}" stroke="{colours[name]}" stroke-width="1.5" fill="none"/>')
        centre = at(x, y)
        out.append(f'<circle cx="{centre[0]:.1f}" cy="{centre[1]:.1f}" r="3.5" fill="{colours[name]}"/>')
    return out


def _step(span: float) -> float:
    """Between two lines: 1, 2 or 5 times a power of ten, about five of them in the span."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span / 5)


def _text(x: float, y: float, text: str, colour: str = GREY, anchor: str = "start", weight: str = "normal") -> str:
    look = f'font-size="11" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, help="Markdown with tables")
    parser.add_argument("--output", type=Path, required=True, help="the SVG file")
    options = parser.parse_args(arguments)
    options.output.write_text(accuracy_svg(panels_of(options.file.read_text())))
    return 0


if __name__ == "__main__":
    main()
