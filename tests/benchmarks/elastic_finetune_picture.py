"""Draws accuracy over seconds of training, a panel for each file of runs, a line for each column.

``python -m tests.benchmarks.elastic_finetune_picture runs/elastic_finetune/bert.jsonl --output accuracy.svg``; several files
are panels side by side. Of our columns those at the chosen alpha are drawn. Points are the ends of epochs, means over the seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ds_terapipe.schedule.svg import COLOURS, GREY, INK, RIGHT, document
from tests.benchmarks.elastic_finetune_plan import Finished, Result, Store, chosen_alpha, mean, plan_of
from tests.benchmarks.elastic_finetune_report import TITLES
from tests.benchmarks.elastic_finetune_run import COLUMNS, OURS
from tests.benchmarks.elastic_finetune_tasks import TASKS

_PANEL, _HIGH, _LEFT, _TOP, _AXIS, _LINE = 400, 220, 46, 46, 40, 18
_FONT, _TICKS = 11, 5


class Panel(NamedTuple):
    """What is accurate by how many of what units."""

    title: str
    unit: str
    curves: list[Curve]


class Curve(NamedTuple):
    """Seconds and accuracy at the end of each epoch, means over seeds."""

    column: str
    points: list[tuple[float, float]]


def curves(finished: Finished) -> list[Curve]:
    """Of every column that has runs."""
    plan = plan_of(finished)
    alpha = chosen_alpha(plan, finished)
    found = []
    for column in COLUMNS:
        some = finished.of(column, alpha if column in OURS else None)
        if some:
            epochs = range(len(some[0].seconds))
            found.append(
                Curve(column, [(_mean(some, epoch), mean([one.dev[epoch] for one in some])) for epoch in epochs])
            )
    return found


def _mean(some: Sequence[Result], epoch: int) -> float:
    return mean([sum(one.seconds[: epoch + 1]) for one in some])


def accuracy_svg(panels: Sequence[Panel]) -> str:
    """The picture, as the text of an SVG file."""
    width, bottom = len(panels) * _PANEL, _TOP + _HIGH
    body = []
    for number, panel in enumerate(panels):
        body += _panel(number * _PANEL, panel)
    drawn = [column for column in COLUMNS if any(curve.column == column for panel in panels for curve in panel.curves)]
    height = bottom + _AXIS + _LINE * len(drawn) + 8
    for place, column in enumerate(drawn):
        y = bottom + _AXIS + _LINE * (place + 1) - 6
        body.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{_colour(column)}"/>')
        body.append(_text(_LEFT + 18, y, TITLES[column], GREY))
    return document(width, height, body)


def _panel(left: float, panel: Panel) -> list[str]:
    seconds = [x for curve in panel.curves for x, _ in curve.points] or [1.0]
    shares = [y for curve in panel.curves for _, y in curve.points] or [0.0, 100.0]
    step_x, step_y = _step(max(seconds)), _step(max(max(shares) - min(shares), 1.0))
    right, low = max(seconds), math.floor(min(shares) / step_y) * step_y
    high = math.ceil(max(shares) / step_y) * step_y
    high += step_y * (high == low)
    wide = _PANEL - _LEFT - RIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return left + _LEFT + wide * x / right, _TOP + _HIGH * (high - y) / (high - low)

    out = [_text(left + _LEFT, 18, panel.title, INK, weight="bold"), *_axes(at, step_x, right, step_y, low, high)]
    out.append(_text(left + _LEFT, _TOP - 12, f"accuracy on dev, % of {panel.unit}", GREY))
    for curve in panel.curves:
        places = [at(*point) for point in curve.points]
        colour, line = _colour(curve.column), "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        out.append(f'<path d="M{line}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    return out


def _axes(
    at: Callable[[float, float], tuple[float, float]],
    step_x: float,
    right: float,
    step_y: float,
    low: float,
    high: float,
) -> list[str]:
    out = []
    for number in range(round((high - low) / step_y) + 1):
        (x, y), (end, _) = at(0, low + number * step_y), at(right, low)
        out.append(f'<path d="M{x:.1f} {y:.1f}H{end:.1f}" stroke="#e5e7eb"/>')
        out.append(_text(x - 6, y + 4, f"{low + number * step_y:g}", GREY, anchor="end"))
    for number in range(int(right / step_x) + 1):
        x, y = at(number * step_x, low)
        out.append(_text(x, y + 16, f"{number * step_x:g}", GREY, anchor="middle"))
    out.append(_text(at(right, low)[0], at(0, low)[1] + 32, "seconds of training", GREY, anchor="end"))
    return out


def _step(span: float) -> float:
    """Between two lines: 1, 2 or 5 times a power of ten, about five of them in the span."""
    rough = span / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _colour(column: str) -> str:
    return COLOURS[COLUMNS.index(column)][1]


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start", weight: str = "normal") -> str:
    look = f'font-size="{_FONT}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


def panel_of(path: Path) -> Panel:
    """Of a file."""
    store = Store(path, None)
    settings: dict[str, Any] = store.settings
    task = TASKS[settings["task"]]
    return Panel(task.title, task.unit, curves(store.read()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.elastic_finetune_picture", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="of tests.benchmarks.elastic_finetune's runs"
    )
    parser.add_argument("--output", type=Path, required=True, help="the SVG file")
    options = parser.parse_args(arguments)
    absent = [str(path) for path in options.files if not path.exists()]
    if absent:
        parser.error(f"got {absent[0]}, must be a file of runs, use one that is there")
    options.output.write_text(accuracy_svg([panel_of(path) for path in options.files]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
