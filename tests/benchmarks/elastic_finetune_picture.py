"""Draws accuracy over seconds of training, a panel for each file of runs, a line for each column.

``python -m tests.benchmarks.elastic_finetune_picture runs/elastic_finetune/bert.jsonl --output accuracy.svg``; several files
are panels side by side. Of our columns those at the chosen alpha are drawn. Points are the ends of epochs, means over the seeds.

Where the runs are gone, a Markdown file stands for them: a panel for each of its tables with columns ``seconds`` and
``dev, %``, a point for each row, the end of its training, with bars of a standard deviation to each side.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
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
    """Accuracies of a task, in per cent of ``unit``."""

    title: str
    unit: str
    curves: list[Curve]


class Curve(NamedTuple):
    """Seconds and accuracy at the end of each epoch, means over seeds, and the standard deviations of the last."""

    column: str
    points: list[tuple[float, float]]
    spread: tuple[float, float] = (0.0, 0.0)


def curves(finished: Finished) -> list[Curve]:
    """Of every column that has runs.

    Raises:
        ValueError: our columns have runs, but no alpha can be chosen.
    """
    plan = plan_of(finished)
    alpha = chosen_alpha(plan, finished)
    if alpha is None and set(plan.columns) & set(OURS):
        raise ValueError(
            "got no seed of which all alphas have a run, must have one to choose alpha, use the same seeds"
        )
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
    width, bottom, colours = len(panels) * _PANEL, _TOP + _HIGH, _colours(panels)
    body = []
    for number, panel in enumerate(panels):
        body += _panel(number * _PANEL, panel, colours)
    height = bottom + _AXIS + _LINE * len(colours) + 8
    for place, (column, colour) in enumerate(colours.items()):
        y = bottom + _AXIS + _LINE * (place + 1) - 6
        body.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        body.append(_text(_LEFT + 18, y, TITLES.get(column, column), GREY))
    return document(width, height, body)


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Of every column that is drawn: those of the benchmark have colours of their own."""
    drawn = dict.fromkeys(curve.column for panel in panels for curve in panel.curves)
    known = [column for column in COLUMNS if column in drawn]
    if known:
        return {column: COLOURS[COLUMNS.index(column)][1] for column in known}
    return {column: dark for column, (_, dark) in zip(drawn, COLOURS, strict=False)}


def _panel(left: float, panel: Panel, colours: Mapping[str, str]) -> list[str]:
    seconds = [x + more for curve in panel.curves for x, _ in curve.points for more in (0.0, curve.spread[0])] or [1.0]
    shares = [
        y + more for curve in panel.curves for _, y in curve.points for more in (0.0, curve.spread[1], -curve.spread[1])
    ] or [0.0, 100.0]
    step_x, step_y = _step(max(seconds)), _step(max(max(shares) - min(shares), 1.0))
    right, low = max(seconds), math.floor(min(shares) / step_y) * step_y
    high = math.ceil(max(shares) / step_y) * step_y
    high += step_y * (high == low)
    wide = _PANEL - _LEFT - RIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return left + _LEFT + wide * x / right, _TOP + _HIGH * (high - y) / (high - low)

    out = [_text(left + _LEFT, 18, panel.title, INK, weight="bold"), *_axes(at, step_x, right, step_y, low, high)]
    out.append(_text(left + _LEFT, _TOP - 12, f"accuracy on dev, %{panel.unit and f' of {panel.unit}'}", GREY))
    for curve in panel.curves:
        places, colour = [at(*point) for point in curve.points], colours[curve.column]
        (x, y), (dx, dy) = curve.points[-1], curve.spread
        lines = [places] if len(places) > 1 else []
        lines += [[at(x - dx, y), at(x + dx, y)]] if dx else []
        lines += [[at(x, y - dy), at(x, y + dy)]] if dy else []
        for line in lines:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in line)
            out.append(f'<path d="M{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
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


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start", weight: str = "normal") -> str:
    look = f'font-size="{_FONT}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


def panels_of(path: Path) -> list[Panel]:
    """Of a file of runs, or of the tables of a Markdown file, which are numbered under their heading."""
    if path.suffix != ".md":
        return [_panel_of_runs(path)]
    found: list[Panel] = []
    heading = ""
    for block in path.read_text().split("\n\n"):
        if block.startswith("#"):
            heading = block.strip("# ")
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
        if rows and {"seconds", "dev, %"} <= set(rows[0]):
            title = f"{heading}, table {sum(one.title.startswith(heading) for one in found) + 1}"
            found.append(Panel(title, "", [_point(dict(zip(rows[0], row, strict=True))) for row in rows[2:]]))
    return found


def _point(row: Mapping[str, str]) -> Curve:
    """A row of a table, whose cells are ``mean ± standard deviation``, or the figure of a single run."""
    seconds, dev = ([*map(float, re.findall(r"[\d.]+", row[name])), 0.0] for name in ("seconds", "dev, %"))
    return Curve(row[""], [(seconds[0], dev[0])], (seconds[1], dev[1]))


def _panel_of_runs(path: Path) -> Panel:
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
        "files", nargs="+", type=Path, metavar="FILE", help="of tests.benchmarks.elastic_finetune's runs, or .md"
    )
    parser.add_argument("--output", type=Path, required=True, help="the SVG file")
    options = parser.parse_args(arguments)
    absent = [str(path) for path in options.files if not path.exists()]
    if absent:
        parser.error(f"got {absent[0]}, must be a file of runs, use one that is there")
    try:
        panels = [panel for path in options.files for panel in panels_of(path)]
    except ValueError as problem:
        parser.error(str(problem))
    options.output.write_text(accuracy_svg(panels))
    return 0


if __name__ == "__main__":
    sys.exit(main())
