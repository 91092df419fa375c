"""What the LAMB benchmark on a CPU concludes from its seconds: tables, what limits each class, targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.lamb_cases import BYTES, STREAM_BYTES, STREAM_ELEMENTS
from tests.benchmarks.lamb_shapes import CLASSES, Parameter, count, of_class
from tests.benchmarks.rounds import Minima, verdict

TITLES = {
    "adamw": "torch AdamW, fused",
    "lamb": "FusedLamb",
    "unchecked": "FusedLamb, check_gradients=False",
    "search": "what it checks, alone",
    "read": "the gradients read by torch.sum",
    "eager": "LAMB in eager PyTorch (timm's algorithm)",
}
STEP_REQUIRED = 1.5  # of AdamW's time, which looks for no nan either
SEARCH_REQUIRED = 0.9  # of what a plain read reads in a second
MEMORY_BOUND = 1.1  # times the bytes counted


@dataclass(frozen=True)
class Case:
    """One model at one number of threads, measured."""

    model: str
    shapes: Sequence[Parameter]
    threads: int
    minima: Minima

    @property
    def stream(self) -> float:
        """Bytes per second of the stream."""
        return STREAM_BYTES * STREAM_ELEMENTS / self.minima.seconds["stream"]

    @property
    def noise(self) -> float:
        """Relative difference of the two times of AdamW; infinity when there is only one."""
        first, second = (self.minima.seconds.get(name, math.inf) for name in ("adamw", "adamw2"))
        return max(first, second) / min(first, second) - 1

    def seconds(self, column: str) -> float | None:
        """Of a column; for AdamW, of the faster of the two."""
        times = [self.minima.seconds[name] for name in (column, f"{column}2") if name in self.minima.seconds]
        return min(times, default=None)


def table(case: Case) -> list[str]:
    """One line per optimizer: seconds, ns per parameter, bytes moved per second and their share of the stream's."""
    parameters = count(case.shapes)
    reference = case.seconds("adamw")
    lines = [
        f"{case.model}, {parameters / 1e6:.1f} M parameters in {len(case.shapes)} tensors, threads: {case.threads}, "
        f"stream {case.stream / 1e9:.1f} GB/s; {case.minima.clean} clean rounds of {case.minima.tried}",
        f"{'':42}{'s':>9}{'ns/param':>10}{'B/param':>9}{'GB/s':>8}{'of stream':>11}{'x AdamW':>9}",
    ]
    for column, title in TITLES.items():
        seconds = case.seconds(column)
        if seconds is None:
            continue
        rate = BYTES[column] * parameters / seconds
        ratio = f"{seconds / reference:.2f}" if reference else "-"
        lines.append(
            f"{title:42}{seconds:9.4f}{seconds / parameters * 1e9:10.3f}{BYTES[column]:9}{rate / 1e9:8.1f}"
            f"{rate / case.stream:11.0%}{ratio:>9}"
        )
    return lines


def limit(effective: float, counted: int) -> str:
    """What limits a class, by the bytes per parameter that the stream would move in its time.

    ``counted`` bytes are moved when nothing stays in a cache; a time worth fewer shows that some does.
    """
    if effective < counted / MEMORY_BOUND:
        return "memory, less what stays in the cache"
    if effective <= counted * MEMORY_BOUND:
        return "memory"
    return "arithmetic or cost per tensor"


def class_table(case: Case) -> list[str]:
    """One line per size class: where the time goes and what limits it."""
    lines = [
        f"{'':20}{'tensors':>8}{'M param':>9}{'MB each':>9}{'AdamW':>10}{'FusedLamb':>11}{'ratio':>7}{'share':>7}"
        f"{'B/param*':>10}  limited by"
    ]
    whole = case.seconds("lamb")
    for kind in CLASSES:
        adamw, lamb = case.seconds(f"adamw:{kind}"), case.seconds(f"lamb:{kind}")
        if adamw is None or lamb is None or whole is None:
            continue
        chosen = [case.shapes[place] for place in of_class(case.shapes, kind)]
        parameters = count(chosen)
        effective = lamb * case.stream / parameters
        lines.append(
            f"{kind:20}{len(chosen):8}{parameters / 1e6:9.2f}{16 * parameters / len(chosen) / 2**20:9.2f}"
            f"{adamw / parameters * 1e9:10.3f}{lamb / parameters * 1e9:11.3f}{lamb / adamw:7.2f}{lamb / whole:7.0%}"
            f"{effective:10.1f}  {limit(effective, BYTES['lamb'])}"
        )
    lines.append(
        "AdamW, FusedLamb: ns per parameter. MB each: p, g, m, v of a tensor, on average. share: of the whole step."
    )
    lines.append(
        f"*what the stream would move in FusedLamb's time; {BYTES['lamb']} if nothing stays in a cache, "
        f"{BYTES['lamb'] - 12} if all does"
    )
    return lines if len(lines) > 3 else []


def target_lines(case: Case) -> list[str]:
    """The targets on this case: the step without the search for nan and inf, as AdamW has none, and the search."""
    lines = []
    step, adamw, search, read = (case.seconds(column) for column in ("unchecked", "adamw", "search", "read"))
    judged = (case.noise, case.minima.conclusive)
    if step is not None and adamw is not None:
        outcome = verdict(adamw / step, 1 / STEP_REQUIRED, *judged)
        lines.append(f"{TITLES['unchecked']}: {step / adamw:.3f}x AdamW's time, at most {STEP_REQUIRED}: {outcome}")
    if search is not None and read is not None:
        outcome = verdict(read / search, SEARCH_REQUIRED, *judged)
        lines.append(
            f"search: {read / search:.2f}x torch.sum's bytes per second, at least {SEARCH_REQUIRED}: {outcome}"
        )
    return [f"{case.model}, threads: {case.threads}, {line}" for line in lines]


def as_json(case: Case) -> Mapping[str, object]:
    """Everything measured."""
    return {
        "model": case.model,
        "parameters": count(case.shapes),
        "threads": case.threads,
        "seconds": case.minima.seconds,
        "clean": case.minima.clean,
        "tried": case.minima.tried,
        "rounds": [{"slowdown": one.slowdown, "seconds": one.seconds} for one in case.minima.rounds],
    }
