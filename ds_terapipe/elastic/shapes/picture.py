"""Picture of a training's shapes, as text and as SVG: processes down, steps to the right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from ds_terapipe.elastic.shapes.history import Period
from ds_terapipe.elastic.shapes.shape_text import shape_text
from ds_terapipe.schedule.svg import COLOURS, DIGIT, EMPTY, GREY, INK, RIGHT, document, legend

_LEFT, _TOP, _AXIS, _LEGEND = 84, 46, 34, 30
_GAP = 5  # between processes
_LAYER, _LEAST, _MOST, _SMALL = 9, 26, 96, 18  # height of a layer; of a process: least, most, and where there are many
_MANY = 16  # processes
_LINES = 5  # height from which on layers have lines between them
_FONT = 11
_OPEN = 0.1  # share of the picture for a last shape of unknown length


def shapes_text(periods: Sequence[Period]) -> str:
    """Return a paragraph for each period: its steps, its shape, and the layers of each process.

    Args:
        periods: of `history.read_history`.
    """
    out = []
    for period in periods:
        ran_on = period.ran_on
        steps = f"step {period.first} on" if period.stop is None else _steps(period.first, period.stop - 1)
        took = "" if period.seconds is None else f", {period.seconds:.1f} s"
        out.append(
            f"{steps}{took}: {shape_text(ran_on)}, {ran_on.frozen_layers} of {ran_on.parts[-1]} layers frozen{_before(period)}"
        )
        holders: dict[int, list[int]] = defaultdict(list)
        for process, (stage, _) in enumerate(period.ranks):
            holders[stage].append(process)
        for stage, (first, stop) in enumerate(pairwise(ran_on.parts)):
            whose = holders[stage]
            processes = f"process{'es' * (len(whose) != 1)} {', '.join(map(str, whose))}"
            out.append(f"  stage {stage}: {_layers(first, stop)} on {processes}")
    return "\n".join(out)


def shapes_svg(periods: Sequence[Period], width: int = 960) -> str:
    """Return the picture as SVG text.

    A process has a row, in which the model's layers lie one below the other, the first one on top. A colour is a
    replica, light if a layer is frozen. Changes are marked with their seconds.

    Args:
        periods: of `history.read_history`.
        width: width in pixels.
    """
    processes = max(len(period.ranks) for period in periods)
    layers = max(period.ran_on.parts[-1] for period in periods)
    row = _SMALL if processes > _MANY else min(max(layers * _LAYER, _LEAST), _MOST)
    bottom = _TOP + processes * (row + _GAP)
    height = bottom + _AXIS + _LEGEND
    begin, end = periods[0].first, _end(periods)
    scale = (width - _LEFT - RIGHT) / (end - begin)
    caption = f"{layers} layers on {processes} process{'es' * (processes != 1)}"
    body = [_text(_LEFT, 16, caption, weight="bold")]
    if periods[-1].stop is None:
        body.append(
            _text(width - RIGHT, 16, "nobody has written how long the last shape was there", colour=GREY, anchor="end")
        )
    body += [
        _text(_LEFT - 8, _TOP + process * (row + _GAP) + row / 2 + 4, f"process {process}", colour=GREY, anchor="end")
        for process in range(processes)
    ]
    for period in periods:
        stop = end if period.stop is None else period.stop
        x, wide = _LEFT + (period.first - begin) * scale, (stop - period.first) * scale
        body += _period(period, x, wide, row, layers)
    body += _axis(periods, end, scale, bottom)
    items = [(COLOURS[0][1], "trained"), (COLOURS[0][0], "frozen, forward only"), (EMPTY, "on other processes")]
    return document(
        width,
        height,
        [*body, *legend(items, "colour: replica; below a step: seconds of the change", _LEFT, width, height - 12)],
    )


def _period(period: Period, x: float, wide: float, row: float, layers: int) -> list[str]:
    ran_on, each = period.ran_on, row / layers
    plural = (
        f"{ran_on.stages} stage{'s' * (ran_on.stages != 1)}",
        f"{ran_on.replicas} replica{'s' * (ran_on.replicas != 1)}",
    )
    out = [
        _fitting(
            x, _TOP - 8, wide, (shape_text(ran_on), " x ".join(plural), f"{ran_on.stages} x {ran_on.replicas}"), INK
        )
    ]
    for process, (stage, replica) in enumerate(period.ranks):
        y = _TOP + process * (row + _GAP)
        out.append(_rect(x, y, wide, row, EMPTY))
        first, stop = ran_on.parts[stage : stage + 2]
        middle = min(max(ran_on.frozen_layers, first), stop)
        light, dark = COLOURS[replica % len(COLOURS)]
        who = f"replica {replica}: " if ran_on.replicas > 1 else ""
        for a, b, colour, ink, what in ((first, middle, light, INK, ", frozen"), (middle, stop, dark, "#ffffff", "")):
            if a == b:
                continue
            tall = (b - a) * each
            out.append(_rect(x, y + a * each, wide, tall, colour))
            if each >= _LINES:
                lines = "".join(f"M{x:.2f} {y + n * each:.2f}h{max(wide - 1, 0):.2f}" for n in range(a + 1, b))
                out.append(f'<path d="{lines}" stroke="#ffffff" stroke-opacity="0.35"/>' if lines else "")
            if tall > _FONT:
                names = (f"{who}{_layers(a, b)}{what}", f"{_layers(a, b)}{what}", _range(a, b))
                out.append(_fitting(x, y + a * each + tall / 2 + 4, wide, names, ink))
    return [line for line in out if line]


def _axis(periods: Sequence[Period], end: float, scale: float, bottom: float) -> list[str]:
    """Return a mark and a number at each change and at the ends; overlapping numbers and remarks are left out."""
    marks = [(float(period.first), str(period.first), _mark(period, number)) for number, period in enumerate(periods)]
    last = periods[-1]
    marks.append((float(end), "" if last.stop is None else str(last.stop), ""))
    out = [_text(_LEFT - 8, bottom + 12, "step", colour=GREY, anchor="end")]
    clear = [0.0, 0.0]  # first free position in each of two lines
    for step, *lines in marks:
        x = _LEFT + (step - periods[0].first) * scale
        if lines[1]:
            out.append(f'<path d="M{x:.2f} {_TOP - 20}V{bottom - 1:g}" stroke="{GREY}" stroke-dasharray="3 2"/>')
        for line, text in enumerate(lines):
            half = len(text) * _FONT * DIGIT / 2
            if text and x - half >= clear[line]:
                out.append(_text(x, bottom + 12 + 14 * line, text, colour=GREY, anchor="middle"))
                clear[line] = x + half + 4
    return out


def _mark(period: Period, number: int) -> str:
    if not number:
        return ""
    return "resumed" if period.begins else f"{period.change_seconds:.2f} s"


def _end(periods: Sequence[Period]) -> float:
    """Return the end of the picture, in steps."""
    last = periods[-1]
    return last.first + max(1.0, _OPEN * (last.first - periods[0].first)) if last.stop is None else last.stop


def _before(period: Period) -> str:
    if period.begins:
        return ", resumed" if period.first else ""
    return f", after a change of {period.change_seconds:.2f} s"


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _layers(first: int, stop: int) -> str:
    return f"layer {first}" if stop - first == 1 else f"layers {_range(first, stop)}"


def _range(first: int, stop: int) -> str:
    return str(first) if stop - first == 1 else f"{first} to {stop - 1}"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    gap = 1.0 if width > 4 else 0.0
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width - gap:.2f}" height="{height:.2f}" fill="{colour}"/>'


def _fitting(x: float, y: float, width: float, texts: Sequence[str], colour: str) -> str:
    """Return the first text that fits, centred."""
    fits = (text for text in texts if len(text) * _FONT * DIGIT <= width - 6)
    text = next(fits, "")
    return text and _text(x + width / 2, y, text, colour=colour, anchor="middle")


def _text(x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", weight: str = "normal") -> str:
    bold = ' font-weight="bold"' if weight == "bold" else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{_FONT}" fill="{colour}" text-anchor="{anchor}"{bold}>{escape(text)}</text>'
