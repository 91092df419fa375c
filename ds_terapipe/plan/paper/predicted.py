"""TeraPipe's results (Li et al., arXiv 2102.07988) from the simulator: predicted where they do not calibrate.

Every published step runs as a schedule in the simulator, in the order ``terapipe``, on the analytic cost of its layout.
The nine rates of that cost are calibrated on seven of the published times, under these rules:

1. A time may calibrate only if it was read, not recalled, its slices were not chosen by the paper's optimiser, and it is
   not setting 10, whose 5x is what the paper is known for, nor setting 3, whose unsliced run is at once the optimiser's
   choice. So every time with the paper's own slices is a prediction.
2. Which seven is computed (`calibrate.most_informative`) from the model and the datasheet's ranges alone, as the choice
   after which all times that were read are expected to be known best. No published time enters.
3. The fit has a prior: each rate's range in `Cluster.ranges`, written down before the first fit; ranges and expected error
   were not changed afterwards. Their author had seen the published times, which is why the ranges are wide;
   `Options.calibrated` off shows what they alone predict.

The error is the mean of |ln(simulated / published)| over the times that were read and did not calibrate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ds_terapipe.plan.costs.analytic import AnalyticCost
from ds_terapipe.plan.costs.calibrate import fit, most_informative, sensitivities
from ds_terapipe.plan.costs.hardware import CLUSTERS, Rates
from ds_terapipe.plan.paper.published import SETTINGS, Figure, Setting, figures
from ds_terapipe.plan.slices import Cuts, best_cut, slice_times
from ds_terapipe.schedule import Action, Op, order
from ds_terapipe.schedule.simulate import simulate

CALIBRATING = 7
_CLUSTER = CLUSTERS["p3.16xlarge"]
_NOT_CALIBRATING = (3, 10)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `reproduce`.

    Attributes:
        calibrated: False leaves all rates at the middle of the datasheet's ranges: then all times are predictions.
        granularity: tokens by which our own slices differ from each other, as in the paper.
        progress: called with a line about each computation.
    """

    calibrated: bool = True
    granularity: int = 8
    progress: Callable[[str], None] | None = None


@dataclasses.dataclass(frozen=True)
class Compared:
    """A published time and the simulator's."""

    figure: Figure
    simulated_s: float
    calibration: bool

    @property
    def error(self) -> float:
        """ln(simulated / published)."""
        return math.log(self.simulated_s / self.figure.published_s)

    @property
    def held_out(self) -> bool:
        """Whether it counts in the mean error: read, and not used to calibrate."""
        return self.figure.source == "read" and not self.calibration


@dataclasses.dataclass(frozen=True)
class Speedup:
    """Speedup by slices in a setting, published and simulated, and our own best slices of one sequence."""

    setting: Setting
    published: float
    simulated: float
    own_best_s: float
    own_best_slices: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """Result of `reproduce`. ``shifts``: by rate, how many widths of its range the fit moved it."""

    compared: tuple[Compared, ...]
    speedups: tuple[Speedup, ...]
    rates: Rates
    shifts: dict[str, float]

    @property
    def held_out_mean_error(self) -> float:
        """Mean of |ln(simulated / published)| over the times that were read and did not calibrate."""
        held_out = [abs(entry.error) for entry in self.compared if entry.held_out]
        return sum(held_out) / len(held_out)

    def as_json(self) -> dict[str, Any]:
        """The figures of `table`, in JSON's types."""
        return {
            "figures": [
                {
                    "setting": entry.figure.setting.number,
                    "kind": entry.figure.kind,
                    "seq_length": entry.figure.seq_length,
                    "slices": list(entry.figure.slices),
                    "published_s": entry.figure.published_s,
                    "simulated_s": entry.simulated_s,
                    "calibration": entry.calibration,
                    "source": entry.figure.source,
                }
                for entry in self.compared
            ],
            "settings": [
                {
                    "setting": entry.setting.number,
                    "speedup_published": entry.published,
                    "speedup_simulated": entry.simulated,
                    "own_best_s": entry.own_best_s,
                    "own_best_slices": list(entry.own_best_slices),
                }
                for entry in self.speedups
            ],
            "held_out_mean_error": self.held_out_mean_error,
        }

    def table(self) -> str:
        """Return all figures, speedups and rates as text, at most 130 columns wide."""
        return "\n".join([*self._figure_lines(), "", *self._speedup_lines(), "", *self._rate_lines()])

    def _figure_lines(self) -> list[str]:
        lines = [
            f"{'set':>3}  {'model':<9}  {'run':<7}  {'L':>4}  {'published':>9}  {'simulated':>9}  {'error':>6}  time is    slices"
        ]
        for entry in self.compared:
            figure = entry.figure
            use = "calibrates" if entry.calibration else figure.source
            lines.append(
                f"{figure.setting.number:>3}  {figure.setting.model.name:<9}  {figure.kind:<7}  {figure.seq_length:>4}  "
                f"{figure.published_s:>7.3f} s  {entry.simulated_s:>7.3f} s  {entry.error:>+7.3f}  "
                f"{use:<10} {compact(figure.slices)}"
            )
        count = sum(entry.held_out for entry in self.compared)
        lines.append(
            f"mean of |ln(simulated / published)|: {self.held_out_mean_error:.3f} over the {count} times that were read and "
            "did not calibrate"
        )
        return lines

    def _speedup_lines(self) -> list[str]:
        lines = ["set  speedup published  simulated   own best  own slices of a sequence"]
        for entry in self.speedups:
            lines.append(
                f"{entry.setting.number:>3}  {entry.published:>16.2f}x  {entry.simulated:>8.2f}x  {entry.own_best_s:>7.3f} s  "
                f"{compact(entry.own_best_slices)}"
            )
        return lines

    def _rate_lines(self) -> list[str]:
        lines = [f"{'rate':<22}  {'value':>8}  {'datasheet':>20}  why"]
        for name, known in _CLUSTER.ranges.items():
            value = getattr(self.rates, name)
            lines.append(f"{name:<22}  {value:>8.3g}  {f'{known.low:.3g} to {known.high:.3g}':>20}  {known.why}")
        return lines


def reproduce(options: Options | None = None) -> Reproduction:
    """Calibrates, simulates all published steps and plans our own slices; some seconds on one core."""
    options = options or Options()
    tell = options.progress or (lambda line: None)
    published = figures()
    chosen = calibration_set(published) if options.calibrated else []
    rates, shifts = _CLUSTER.rates, dict.fromkeys(_CLUSTER.ranges, 0.0)
    if chosen:
        tell(f"calibrating on {len(chosen)} of {len(published)} published times")
        used = [published[index] for index in chosen]
        found = fit(lambda tried: [closed_form(figure, tried) for figure in used], _times(used), _CLUSTER.ranges)
        rates, shifts = found.rates, found.shifts
    compared = []
    for index, figure in enumerate(published):
        tell(f"simulating {index + 1} of {len(published)}: setting {figure.setting.number}, {compact(figure.slices)}")
        compared.append(Compared(figure, simulated(figure, rates), index in chosen))
    speedups = []
    for setting in SETTINGS:
        tell(f"planning setting {setting.number}")
        speedups.append(_speedup(setting, compared, rates, options.granularity))
    return Reproduction(tuple(compared), tuple(speedups), rates, shifts)


def calibration_set(published: Sequence[Figure]) -> list[int]:
    """Indices of the times that calibrate, by rules 1 and 2 above."""
    slopes = sensitivities(lambda rates: [closed_form(figure, rates) for figure in published], _CLUSTER.ranges)
    read = [index for index, figure in enumerate(published) if figure.source == "read"]
    allowed = [i for i in read if published[i].uniform and published[i].setting.number not in _NOT_CALIBRATING]
    return most_informative(slopes, allowed, read, CALIBRATING, _CLUSTER.ranges)


def layout_cost(setting: Setting, rates: Rates) -> AnalyticCost:
    """The cost of one sequence at a time in a setting: equal stages, messages that block, as in the paper's runs."""
    layers = (setting.model.num_layers // setting.stages,) * setting.stages
    return AnalyticCost(setting.model, _CLUSTER, rates, layers, setting.tensor_parallel, blocking_messages=True)


def closed_form(figure: Figure, rates: Rates) -> float:
    """Return the seconds of a step by the paper's formula, sum t + (K - 1) max t, and the part after the last backward.

    Forward and backward have a maximum each, which need not be the same slice's. Then it is exact for equal stages in the
    order ``terapipe``, and so much faster than the simulator that the fit and the choice of slices use it.
    """
    setting = figure.setting
    cost = layout_cost(setting, rates)
    length = np.array(figure.slices, dtype=float)
    context = np.cumsum(length) - length
    passes = (cost.forward(0, length, context), cost.backward(0, length, context))
    flow = sum(figure.sequences * np.sum(seconds) + (setting.stages - 1) * np.max(seconds) for seconds in passes)
    return float(flow) + cost.step_overhead(setting.data_parallel)


def simulated(figure: Figure, rates: Rates) -> float:
    """Seconds of a step by the simulator, the optimiser's part included."""
    setting, lengths = figure.setting, figure.slices
    cost = layout_cost(setting, rates)
    contexts = (0, *itertools.accumulate(lengths))

    @cache
    def seconds(op: Op, stage: int, index: int) -> float:
        run = cost.forward if op is Op.FORWARD else cost.backward
        return run(stage, float(lengths[index]), float(contexts[index]))

    def compute(action: Action) -> float:
        return seconds(action.op, action.stage, action.unit.slice)

    grid = order("terapipe", setting.stages, [len(lengths)] * figure.sequences)
    return simulate(grid, compute).makespan + cost.step_overhead(setting.data_parallel)


def best_slices(figure: Figure, rates: Rates, granularity: int) -> tuple[int, ...]:
    """Our own slices for the layout and sequences of a published step.

    TeraPipe's dynamic programme takes forward and backward of a slice together. A step has a slowest forward and a slowest
    backward, which may be of different slices, so the paper's own slices can win by a hair: then they are the best.
    """
    setting = figure.setting
    cuts = Cuts.of(figure.seq_length, granularity)
    # All stages are equal, so one of them says what a slice costs.
    times = slice_times(layout_cost(setting, rates), 1, cuts)
    found = cuts.lengths(best_cut(times, (setting.stages - 1) / figure.sequences).counts)
    return min(found, figure.slices, key=lambda slices: closed_form(dataclasses.replace(figure, slices=slices), rates))


def compact(slices: Sequence[int]) -> str:
    """``64x26 56x6 48``: equal neighbours together; `published.lengths` reads it."""
    groups = [(length, len(list(group))) for length, group in itertools.groupby(slices)]
    return " ".join(f"{length}x{count}" if count > 1 else str(length) for length, count in groups)


def _times(published: Sequence[Figure]) -> list[float]:
    return [figure.published_s for figure in published]


def _speedup(setting: Setting, compared: Sequence[Compared], rates: Rates, granularity: int) -> Speedup:
    own = {entry.figure.kind: entry for entry in compared if entry.figure.setting == setting}
    without, sliced = own["without"], own["with"]
    slices = best_slices(sliced.figure, rates, granularity)
    best = dataclasses.replace(sliced.figure, slices=slices)
    return Speedup(
        setting,
        without.figure.published_s / sliced.figure.published_s,
        without.simulated_s / sliced.simulated_s,
        simulated(best, rates),
        slices,
    )
