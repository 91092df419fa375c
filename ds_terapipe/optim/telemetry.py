"""Trust ratios: per layer on demand, as a summary to a monitor every few steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_terapipe.names import UNUSED
from ds_terapipe.optim.modes import ADAPT, Rule
from ds_terapipe.optim.op.plain import FOUND_INF

logger = logging.getLogger(__name__)

Event = tuple[str, float, int]
Monitor = Callable[[list[Event]], None]


class LayerStatistics(NamedTuple):
    """Statistics of one layer in the last step.

    Attributes:
        name: of the parameter, with the number of the sub-layer in brackets where it has some.
        weight_norm: 2-norm of the parameter before the step, before any clamp; 0 where the ratio is not used.
        update_norm: 2-norm of the update before the learning rate; 0 where the ratio is not used.
        trust_ratio: factor of the update.
        clamped: whether a clamp of the weight norm or of the ratio changed the ratio.
    """

    name: str
    weight_norm: float
    update_norm: float
    trust_ratio: float
    clamped: bool


class Report(NamedTuple):
    """Report of a table's last step.

    Attributes:
        layers: its layers.
        squares: sum of the squares of all ranks' gradients as they came; negative if it was not taken.
        scale: factor of the gradients that undid the loss scale.
        step: number of the step, from 1.
    """

    layers: list[LayerStatistics]
    squares: float
    scale: float
    step: int


def _sent(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a copy in host memory, and what its arrival is marked by: a CUDA tensor's makes no host wait."""
    if values.device.type != "cuda":
        return values.detach().clone(), None
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    event = torch.cuda.Event()
    copy.copy_(values, non_blocking=True)
    event.record(torch.cuda.current_stream(values.device))
    return copy, event


def layer_statistics(
    names: Sequence[str], norms: Tensor, ratios: Tensor, rules: Sequence[Rule]
) -> list[LayerStatistics]:
    """Statistics of the layers of a table.

    Args:
        names: one per layer.
        norms: float64 [L, 2] in host memory, sums of squares of weights and updates.
        ratios: float64 [L] in host memory.
        rules: one row per layer.
    """
    rows = zip(names, norms.sqrt().tolist(), ratios.tolist(), rules, strict=True)
    return [
        LayerStatistics(name, weight, update, ratio, _clamped(weight, update, rule))
        for name, (weight, update), ratio, rule in rows
        if name != UNUSED
    ]


def _clamped(weight: float, update: float, rule: Rule) -> bool:
    if not rule.has(ADAPT) or weight == 0 or update == 0:
        return False
    free = rule.min_weight_norm <= weight <= rule.max_weight_norm
    return not (free and rule.min_coeff <= weight / update <= rule.max_coeff)


def summary(report: Report) -> list[Event]:
    """The events that a monitor is given for a report of all layers.

    Returns:
        (tag, value, step): least, mean and greatest trust ratio, share of clamped layers, 2-norm of the gradients before
        clipping where it was taken.
    """
    if not report.layers:
        return []
    ratios = [layer.trust_ratio for layer in report.layers]
    values = {
        "min_trust_ratio": min(ratios),
        "mean_trust_ratio": sum(ratios) / len(ratios),
        "max_trust_ratio": max(ratios),
        "clamped_share": sum(layer.clamped for layer in report.layers) / len(ratios),
    }
    if report.squares >= 0:
        values["gradient_norm"] = math.sqrt(report.squares) * report.scale
    return [(f"Train/Lamb/{name}", value, report.step) for name, value in values.items()]


class Arrivals:
    """Values on their way to host memory, and what is called with them there, in order."""

    def __init__(self) -> None:
        self._underway: list[tuple[list[tuple[Tensor, torch.cuda.Event | None]], Callable[[list[Tensor]], None]]] = []

    def add(self, values: Sequence[Tensor], call: Callable[[list[Tensor]], None]) -> None:
        """Send values of the current streams."""
        self._underway.append((list(map(_sent, values)), call))

    def poll(self, wait: bool = False) -> None:
        """Call what is due for the values that have arrived, or with ``wait`` for all."""
        while self._underway:
            values, call = self._underway[0]
            events = [event for _, event in values if event is not None]
            if not wait and not all(event.query() for event in events):
                return
            for event in events:
                event.synchronize()
            del self._underway[0]
            call([copy for copy, _ in values])


class SkippedSteps:
    """Counts the steps that were skipped, and warns of each; for tables on a GPU some steps later."""

    def __init__(self) -> None:
        self._count = 0
        self._arrivals = Arrivals()

    def note(self, table: Any) -> None:
        """Count a step whose control values report a nan or inf gradient. Call it before a priming step is marked."""
        if not _capturing([table]):
            self._arrivals.add([table.control], partial(self._count_skipped, table))
            self._arrivals.poll()

    def _count_skipped(self, table: Any, values: list[Tensor]) -> None:
        (control,) = values
        table.learn(control)
        if control[FOUND_INF] != 0:
            self._count += 1
            logger.warning(
                "FusedLamb skipped a step: a gradient was nan or inf; nothing was changed (%d skipped so far)",
                self._count,
            )

    def total(self) -> int:
        """Number of all skipped steps so far; waits for the devices."""
        self._arrivals.poll(wait=True)
        return self._count


class Reports:
    """Periodic summaries, given to the monitor when their values are in host memory."""

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self._seen: dict[int, Sequence[Any]] = {}
        self._rounds = 0
        self._arrivals = Arrivals()

    def note(self, records: Sequence[Any], tables: Sequence[Any], all_records: int, interval: int) -> None:
        """A step was made on these groups. A wrapper may step one group at a time: a step is over when all had their turn."""
        if self.monitor is None or not interval:
            return
        self._seen.update((id(record), tables) for record in records)
        if len(self._seen) >= all_records:
            used = list({id(table): table for each in self._seen.values() for table in each}.values())
            self._seen = {}
            self._rounds += 1
            if self._rounds % interval == 0 and not _capturing(used):
                self._arrivals.add([table.report() for table in used], partial(self._tell, used))
        self._arrivals.poll()

    def _tell(self, tables: Sequence[Any], values: list[Tensor]) -> None:
        reports = [table.read(value) for table, value in zip(tables, values, strict=True)]
        layers = [layer for report in reports for layer in report.layers]
        squares = -1.0 if any(r.squares < 0 for r in reports) else max(r.squares for r in reports)
        if self.monitor is not None:
            self.monitor(summary(Report(layers, squares, reports[0].scale, max(r.step for r in reports))))


def _capturing(tables: Sequence[Any]) -> bool:
    return any(table.device.type == "cuda" for table in tables) and torch.cuda.is_current_stream_capturing()
