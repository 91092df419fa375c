"""What the large-batch benchmark found: a table of validation losses over batches, and a plot of it as SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from tests.benchmarks.large_batch_plan import NAMES, Plan, Row, rows, tuning
from tests.benchmarks.large_batch_run import Result, Run

_COLOURS = ("#2563eb", "#b45309", "#93c5fd", "#d6a76b")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 436, 64, 24, 40, 112


class Cell(NamedTuple):
    """The seeds of one row at one batch: their losses in nats (infinity: diverged), and how many are still missing."""

    learning_rate: float
    losses: tuple[float, ...]
    missing: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds, of a sample; zero for a single seed."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 and math.isfinite(self.mean) else 0.0


def cell(runs: Sequence[Run] | None, finished: Sequence[Result]) -> Cell | None:
    """None while the LR is not known or no seed is finished."""
    done = {result.run: math.inf if result.loss is None else result.loss for result in finished}
    losses = tuple(done[run] for run in runs or () if run in done)
    return Cell(runs[0].learning_rate, losses, len(runs) - len(losses)) if runs and losses else None


def _text(one: Cell | None) -> str:
    if one is None:
        return "not run"
    diverged = sum(math.isinf(loss) for loss in one.losses)
    seeds = f", {len(one.losses)} seed{'s' * (len(one.losses) > 1)} only" if one.missing else ""
    value = f"{one.mean:.4f} ± {one.spread:.4f}" if not diverged else f"diverged ({diverged} of {len(one.losses)})"
    return f"{value} (LR {one.learning_rate:.3g}{seeds})"


def table(plan: Plan, finished: Sequence[Result]) -> list[str]:
    """Markdown: validation loss in nats per row and batch, mean and standard deviation over the seeds, and the LR."""
    lines = [
        "| | " + " | ".join(f"batch {batch}, {plan.samples // batch} steps" for batch in plan.batches) + " |",
        "|---" * (len(plan.batches) + 1) + "|",
    ]
    for row in rows(plan, finished):
        cells = (_text(cell(row.runs[batch], finished)) for batch in plan.batches)
        lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    return lines


def tuning_table(plan: Plan, finished: Sequence[Result]) -> list[str]:
    """Every LR that was tried, with its loss; the best in bold, and a note where it is the last one tried."""
    lines = []
    places = [(name, batch) for name in NAMES for batch in plan.batches]
    for optimizer, batch in places:
        best, _ = tuning(plan, optimizer, batch, finished)
        tried = sorted(
            (one for one in finished if _is_of(one.run, plan, optimizer, batch)), key=lambda one: one.run.learning_rate
        )
        parts = []
        for one in tried:
            loss = "diverged" if one.loss is None else f"{one.loss:.4f}"
            parts.append(
                f"**{one.run.learning_rate:.3g}: {loss}**"
                if one.run == best
                else f"{one.run.learning_rate:.3g}: {loss}"
            )
        edge = ", at the edge of those tried" if best and best in (tried[0].run, tried[-1].run) else ""
        lines.append(f"- {optimizer}, batch {batch}: {', '.join(parts) or 'not run'}{edge}")
    return lines


def _is_of(run: Run, plan: Plan, optimizer: str, batch: int) -> bool:
    same = plan.run(optimizer, batch, run.learning_rate, plan.seeds[0])
    return run == same


def conclusion(plan: Plan, finished: Sequence[Result]) -> list[str]:
    """LAMB's rows against AdamW's at every batch: the difference of the means, and whether it is beyond the noise.

    AdamW's are of the same rule; LAMB under the rule is also compared with AdamW tuned, for the rule is to save the
    tuning. The noise is twice the standard error of the difference. Nothing is said of cells whose seeds are not all there.
    """
    tuned, tuned_adamw, ruled, ruled_adamw = rows(plan, finished)
    lines = []
    for lamb, other in ((tuned, tuned_adamw), (ruled, tuned_adamw), (ruled, ruled_adamw)):
        for batch in plan.batches:
            ours, theirs = cell(lamb.runs[batch], finished), cell(other.runs[batch], finished)
            place = f"- batch {batch}, {lamb.title} beside {other.title}"
            if ours is None or theirs is None or ours.missing or theirs.missing:
                lines.append(f"{place}: not finished")
            elif math.isinf(ours.mean) or math.isinf(theirs.mean):
                who = [name for name, one in (("LAMB", ours), ("AdamW", theirs)) if math.isinf(one.mean)]
                lines.append(f"{place}: {' and '.join(who)} diverged")
            else:
                lines.append(f"{place}: {_compare(ours, theirs)}")
    return lines


def _compare(ours: Cell, theirs: Cell) -> str:
    difference = ours.mean - theirs.mean
    noise = 2 * math.sqrt(ours.spread**2 / len(ours.losses) + theirs.spread**2 / len(theirs.losses))
    if abs(difference) <= noise:
        return f"no difference beyond the noise ({difference:+.4f}, noise {noise:.4f})"
    word = "LAMB is better" if difference < 0 else "LAMB is worse"
    return f"{word} by {abs(difference):.4f} (noise {noise:.4f})"


def plot_svg(plan: Plan, finished: Sequence[Result]) -> str:
    """Validation loss over the batch, a line per row through the means, a bar from the lowest to the highest seed."""
    cells = [{batch: cell(row.runs[batch], finished) for batch in plan.batches} for row in rows(plan, finished)]
    values = [loss for row in cells for one in row.values() if one for loss in one.losses if math.isfinite(loss)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.1
    low, high = low - margin, high + margin
    columns = {
        batch: _LEFT + (_WIDTH - _LEFT - _RIGHT) * (0.5 + index) / len(plan.batches)
        for index, batch in enumerate(plan.batches)
    }

    def height(loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - loss) / (high - low)

    body = _axes(plan, columns, low, high, height)
    for index, (row, ones) in enumerate(zip(rows(plan, finished), cells, strict=True)):
        body += _line(row, ones, columns, height, index)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#1f2937">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _axes(plan: Plan, columns: dict[int, float], low: float, high: float, height) -> list[str]:
    title = f"Validation loss after {plan.samples} samples, nats (bars: lowest and highest seed)"
    out = [f'<text x="{_LEFT}" y="22" font-weight="bold">{title}</text>']
    for part in range(6):
        loss = low + (high - low) * part / 5
        y = height(loss)
        out.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#e5e7eb"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#4b5563">{loss:.2f}</text>')
    for batch, x in columns.items():
        out.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">batch {batch}</text>')
    return out


def _line(row: Row, ones: dict[int, Cell | None], columns: dict[int, float], height, index: int) -> list[str]:
    """The rows stand a little beside one another, so that bars don't hide each other."""
    colour, shift = _COLOURS[index], 7 * (index - 1.5)
    out, corners = [], []
    for batch, one in ones.items():
        if one is None:
            continue
        finite = [loss for loss in one.losses if math.isfinite(loss)]
        x = columns[batch] + shift
        if len(finite) < len(one.losses):
            out.append(f'<text x="{x:.1f}" y="{_TOP + 10 + 14 * index}" fill="{colour}">diverged</text>')
        if finite:
            mean = statistics.fmean(finite)
            corners.append(f"{x:.1f} {height(mean):.1f}")
            span = f"M{x:.1f} {height(min(finite)):.1f}V{height(max(finite)):.1f}"
            out.append(f'<path d="{span}" stroke="{colour}" stroke-width="2"/>')
            out.append(f'<circle cx="{x:.1f}" cy="{height(mean):.1f}" r="4" fill="{colour}"/>')
    if corners:
        out.append(f'<path d="M{"L".join(corners)}" stroke="{colour}" fill="none"/>')
    y = _HEIGHT - _BOTTOM + 44 + 16 * index
    out.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
    out.append(f'<text x="{_LEFT + 18}" y="{y}">{escape(row.title)}</text>')
    return out
