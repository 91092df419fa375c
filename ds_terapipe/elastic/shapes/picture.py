"""Picture of a training's shapes, as text and as SVG: processes down, steps to the right."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ds_terapipe.elastic.shapes.history import Period, shape_text
from ds_terapipe.schedule.svg import COLOURS, DIGIT, EMPTY, GREY, INK, RIGHT, document, legend

_LEFT, _TOP, _BELOW = 84, 46, 64  # margins; below the processes are the steps and the legend
_GAP = 5  # between processes
_LAYER, _LEAST, _MOST = 9, 18, 96  # height of a layer, and of a process
_FONT = 11
_OPEN = 0.1  # share of the picture for a last shape of unknown length


def shapes_text(periods: Sequence[Period]) -> str:
    """Return a paragraph for each period: its steps, its shape, and the layers of each process.

    Args:
        periods: of `history.read_history`.
    """
    out = []
    for period in periods:
        ran_on, last = period.ran_on, None if period.stop is None else period.stop - 1
        steps = "step" if last in (None, period.first) else "steps"
        until = " on" if last is None else f" to {last}" * (last > period.first)
        took = "" if period.seconds is None else f", {period.seconds:.1f} s"
        before = (
            ", resumed" * bool(period.first) if period.begins else f", after a change of {period.change_seconds:.2f} s"
        )
        frozen = f"{ran_on.frozen_layers} of {ran_on.parts[-1]} layers frozen"
        out.append(f"{steps} {period.first}{until}{took}: {shape_text(ran_on)}, {frozen}{before}")
        for stage, (place, first, stop) in enumerate(ran_on.placed):
            holders = [str(process) for process, (of, _) in enumerate(period.ranks) if of == place]
            processes = f"process{'es' * (len(holders) != 1)} {', '.join(holders)}"
            out.append(f"  stage {stage}: {_layers(first, stop)} on {processes}")
    return "\n".join(out)


def shapes_svg(periods: Sequence[Period], width: int = 960) -> str:
    """Return the picture as SVG text.

    A process has a row, in which the model's layers lie one below the other, the first one on top. A colour is a
    replica, light if a layer is frozen. Below each change are its step and its seconds.

    Args:
        periods: of `history.read_history`.
        width: width in pixels.
    """
    processes = max(len(period.ranks) for period in periods)
    layers = max(period.ran_on.parts[-1] for period in periods)
    row = min(max(layers * _LAYER, _LEAST), _MOST)
    bottom, last = _TOP + processes * (row + _GAP), periods[-1]
    begin, end = periods[0].first, last.stop
    caption = f"{layers} layers on {processes} process{'es' * (processes != 1)}"
    if end is None:
        end = last.first + max(1, round(_OPEN * (last.first - begin)))
        caption += "; the end of the last shape is unknown"
    scale = (width - _LEFT - RIGHT) / (end - begin)
    body = [_text(_LEFT, 16, caption)]
    for process in range(processes):
        body.append(_text(_LEFT - 8, _TOP + process * (row + _GAP) + row / 2 + 4, f"process {process}", GREY, "end"))
    for period in periods:
        stop = end if period.stop is None else period.stop
        body += _period(period, _LEFT + (period.first - begin) * scale, (stop - period.first) * scale, row)
    body += _axis(periods, scale, bottom)
    items = [(COLOURS[0][1], "trained"), (COLOURS[0][0], "frozen, forward only"), (EMPTY, "on other processes")]
    remark, height = "2 x 1: stages x replicas; colour: replica; below a step: seconds of the change", bottom + _BELOW
    return document(width, height, [*body, *legend(items, remark, _LEFT, width, height - 12)])


def _period(period: Period, x: float, wide: float, row: float) -> list[str]:
    ran_on, each = period.ran_on, row / period.ran_on.parts[-1]
    out = _fitting(x, _TOP - 8, wide, (shape_text(ran_on), f"{ran_on.stages} x {ran_on.replicas}"), INK)
    for process, (place, replica) in enumerate(period.ranks):
        y = _TOP + process * (row + _GAP)
        out.append(_rect(x, y, wide, row, EMPTY))
        light, dark = COLOURS[replica % len(COLOURS)]
        kinds = []
        for first, stop in (bounds for of, *bounds in ran_on.placed if of == place):
            middle = min(max(ran_on.frozen_layers, first), stop)
            kinds += [(first, middle, light, INK, ", frozen"), (middle, stop, dark, "#ffffff", "")]
        for a, b, colour, ink, frozen in kinds:
            if a < b:
                out.append(_rect(x, y + a * each, wide, (b - a) * each, colour))
            if (b - a) * each > _FONT:
                names = (f"{_layers(a, b)}{frozen}", _layers(a, b))
                out += _fitting(x, y + (a + b) / 2 * each + 4, wide, names, ink)
    return out


def _axis(periods: Sequence[Period], scale: float, bottom: float) -> list[str]:
    """Return a step and a remark at each change, and the last step; those without room are left out."""
    marks = [(periods[0].first, "")]
    for period in periods[1:]:
        marks.append((period.first, "resumed" if period.begins else f"{period.change_seconds:.2f} s"))
    if periods[-1].stop is not None:
        marks.append((periods[-1].stop, ""))
    out = [_text(_LEFT - 8, bottom + 12, "step", GREY, "end")]
    clear = [0.0, 0.0]  # first free position in each of two lines
    for step, remark in marks:
        x = _LEFT + (step - periods[0].first) * scale
        for line, text in enumerate((str(step), remark)):
            half = len(text) * _FONT * DIGIT / 2
            if text and x - half >= clear[line]:
                out.append(_text(x, bottom + 12 + 14 * line, text, GREY, "middle"))
                clear[line] = x + half + 4
    return out


def _layers(first: int, stop: int) -> str:
    return f"layer {first}" if stop - first == 1 else f"layers {first} to {stop - 1}"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    gap = 1.0 if width > 4 else 0.0
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width - gap:.2f}" height="{height:.2f}" fill="{colour}"/>'


def _fitting(x: float, y: float, width: float, texts: Sequence[str], colour: str) -> list[str]:
    """Return the first text that fits, centred."""
    fits = [text for text in texts if len(text) * _FONT * DIGIT <= width - 6]
    return [_text(x + width / 2, y, text, colour, "middle") for text in fits[:1]]


def _text(x: float, y: float, text: str, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{_FONT}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
