"""Draws all pictures of docs/ from the data beside them and the schedules that the engine executes.

    python docs/draw_pictures.py

schedules.svg is arithmetic: slices of equal cost, backward twice as long as forward, messages free. The others show runs:

- timeline.svg from step.json: ``make demo``, then
  ``ds_terapipe trace build/demo/uncut.json build/demo/trace.json --step 42 --merged docs/step.json``.
- training.svg from training.jsonl: the trainings in the file of ``tests.benchmarks.elastic_finetune`` (benchmarks.md),
  ``grep '"probe": 0' runs/elastic_finetune/gpt.jsonl > docs/training.jsonl``.
- shapes.svg from history.jsonl, which the run of tutorials/freeze.md writes.
- finetune.svg from finetune.json, by hand from the tables of benchmarks.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from ds_terapipe.commands.trace import panels_of
from ds_terapipe.elastic.shapes.history import read_history
from ds_terapipe.elastic.shapes.picture import shapes_svg
from ds_terapipe.schedule import Action, Grid, Op, Panel, Placement, order, timelines_svg
from ds_terapipe.schedule.svg import COLOURS, GREY, INK, RIGHT, document
from ds_terapipe.tracing.chrome import MEASURED, PREDICTED, read

FOLDER = Path(__file__).parent
STAGES, SEQUENCES, SLICES = 4, 2, 4
COLUMNS = {
    "pipeline": "DeepSpeed, pipeline",
    "replicas": "DeepSpeed, data parallel",
    "freeze": "ours, freezing alone",
    "reshape": "ours, with the reshape",
    "cache": "ours, with the reshape and the cache",
}
_PANEL, _HIGH, _LEFT, _TOP, _AXIS, _LINE = 400, 220, 46, 46, 40, 18


def schedules() -> str:
    """Orders of the same work on four places: uncut, and ours."""
    twice = Placement.interleaved(STAGES, 2)
    return timelines_svg(
        [
            _panel_of("1F1B: 4 stages, 2 sequences", "1f1b", 1),
            _panel_of('"1f1b": the same, each sequence in 4 slices', "1f1b", SLICES),
            _panel_of('"zero_bubble": weight gradients in the waits', "zero_bubble", SLICES),
            _panel_of('"interleaved": two stages on each place, half as long', "interleaved", SLICES, twice),
        ]
    )


def _panel_of(title: str, name: str, slices: int, placement: Placement | None = None) -> Panel:
    grid = order(name, placement or STAGES, [slices] * SEQUENCES)
    parts = slices * (2 if placement else 1)
    apart = _slices_of_weight_gradients(grid, slices)

    def time(action: Action) -> float:
        if action.op is Op.WEIGHT_GRADIENTS:
            return apart[action] / parts
        return (2 if action.op is Op.BACKWARD and not apart else 1) / parts

    return Panel.of(title, grid, time, placement)


def _slices_of_weight_gradients(grid: Grid, slices: int) -> dict[Action, int]:
    """Slices whose weight gradients an action makes: those since the one before it, of the same micro-batch."""
    found, left = {}, {}
    for action in (each for row in grid for each in row if each.op is Op.WEIGHT_GRADIENTS):
        key = action.stage, action.unit.micro_batch
        found[action] = left.get(key, slices) - action.unit.slice
        left[key] = action.unit.slice
    return found


def timeline() -> str:
    """A step that `make demo` has measured, below the same step uncut, as predicted."""
    events = read(FOLDER / "step.json")
    slices = 1 + max(event.action.unit.slice for event in events if event.action)
    runs = ((PREDICTED, "uncut"), (MEASURED, f"{slices} slices"))
    return timelines_svg([panels_of(title, [event for event in events if event.run == run])[0] for run, title in runs])


def finetune() -> str:
    """The ends of fine-tunings from real weights."""
    return accuracy(json.loads((FOLDER / "finetune.json").read_text())["panels"])


def training() -> str:
    """A training from random weights, epoch by epoch, from the lines that its benchmark has written.

    An epoch counts as many seconds as if all its steps were as fast as the fastest one: other work on the machine counts less.
    """
    lines = {}
    for found in map(json.loads, (FOLDER / "training.jsonl").read_text().splitlines()):
        seconds = accumulate(found["steps"] * step for step in found["fastest"])
        lines[COLUMNS[found["run"]["column"]]] = list(zip(seconds, found["dev"], strict=True))
    return accuracy(
        [{"title": "GPT on Python's library, 6 layers x 128", "axis": "accuracy on dev, % of bytes", "lines": lines}]
    )


def accuracy(panels: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy over seconds of training: a line of points for each column, with standard deviations to each side."""
    titles = dict.fromkeys(title for panel in panels for title in panel["lines"])
    colours = {title: dark for title, (_, dark) in zip(titles, COLOURS, strict=False)}
    body = [line for number, panel in enumerate(panels) for line in _accuracy(number * _PANEL, panel, colours)]
    bottom = _TOP + _HIGH + _AXIS
    for place, (title, colour) in enumerate(colours.items()):
        y = bottom + _LINE * (place + 1) - 6
        body.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        body.append(_text(_LEFT + 18, y, title))
    return document(len(panels) * _PANEL, bottom + _LINE * len(colours) + 8, body)


def _accuracy(left: float, panel: Mapping[str, Any], colours: Mapping[str, str]) -> list[str]:
    lines = {name: [(x, y, *(spread or (0, 0))) for x, y, *spread in points] for name, points in panel["lines"].items()}
    every = [point for points in lines.values() for point in points]
    right = max(x + dx for x, _, dx, _ in every)
    lowest, highest = min(y - dy for _, y, _, dy in every), max(y + dy for _, y, _, dy in every)
    step_x, step_y = _step(right), _step(highest - lowest)
    low, high = math.floor(lowest / step_y) * step_y, math.ceil(highest / step_y) * step_y

    def at(x: float, y: float) -> tuple[float, float]:
        return left + _LEFT + (_PANEL - _LEFT - RIGHT) * x / right, _TOP + _HIGH * (high - y) / (high - low)

    (begin, floor), (end, _) = at(0, low), at(right, low)
    out = [_text(begin, 18, panel["title"], INK, weight="bold")]
    for number in range(round((high - low) / step_y) + 1):
        _, y = at(0, low + number * step_y)
        out.append(f'<path d="M{begin:.1f} {y:.1f}H{end:.1f}" stroke="#e5e7eb"/>')
        out.append(_text(begin - 6, y + 4, f"{low + number * step_y:g}", anchor="end"))
    for number in range(int(right / step_x) + 1):
        out.append(_text(at(number * step_x, low)[0], floor + 16, f"{number * step_x:g}", anchor="middle"))
    out.append(_text(end, floor + 32, "seconds of training", anchor="end"))
    out.append(_text(begin, _TOP - 12, panel["axis"]))
    for name, points in lines.items():
        bars = [[(x - dx, y), (x + dx, y)] for x, y, dx, _ in points if dx]
        bars += [[(x, y - dy), (x, y + dy)] for x, y, _, dy in points if dy]
        joined = [[(x, y) for x, y, *_ in points]] if len(points) > 1 else []
        for path in joined + bars:
            out.append(_path([at(*corner) for corner in path], colours[name]))
        for x, y, *_ in points:
            centre = at(x, y)
            out.append(f'<circle cx="{centre[0]:.1f}" cy="{centre[1]:.1f}" r="3.5" fill="{colours[name]}"/>')
    return out


def _path(corners: Sequence[tuple[float, float]], colour: str) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    return f'<path d="M{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>'


def _step(span: float) -> float:
    """Between two lines: 1, 2 or 5 times a power of ten, about five of them in the span."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= span / 5)


def _text(x: float, y: float, text: str, colour: str = GREY, anchor: str = "start", weight: str = "normal") -> str:
    look = f'font-size="11" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'


def pictures() -> dict[str, str]:
    """Names and texts of all pictures."""
    return {
        "schedules.svg": schedules(),
        "timeline.svg": timeline(),
        "shapes.svg": shapes_svg(read_history(str(FOLDER / "history.jsonl"))),
        "finetune.svg": finetune(),
        "training.svg": training(),
    }


def main() -> None:
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
