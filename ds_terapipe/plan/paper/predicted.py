"""TeraPipe's results (Li et al., arXiv 2102.07988) from the simulator: predicted where they do not calibrate.

Every published step runs as a schedule in the simulator, in the order ``terapipe``, on the analytic cost of its layout.
The nine rates of that cost are calibrated on seven of the published times (`published.CALIBRATED`), under these rules:

1. A time may calibrate only if it was read, not recalled, its slices were not chosen by the paper's optimiser, and it is
   not setting 10, whose 5x is what the paper is known for, nor setting 3, whose unsliced run is at once the optimiser's
   choice. So every time with the paper's own slices is a prediction.
2. Which seven is computed (Bayesian V-optimal design) from the model and the datasheet's ranges alone, as the choice after
   which all times that were read are expected to be known best. No published time enters.
3. The fit has a prior: each rate's range in `Cluster.ranges`, written down before the first fit; ranges and expected error
   were not changed afterwards. Their author had seen the published times, which is why the ranges are wide; without
   calibration the table shows what they alone predict.

The error is the mean of |ln(simulated / published)| over the times that were read and did not calibrate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ds_terapipe.plan.costs.analytic import AnalyticCost
from ds_terapipe.plan.costs.hardware import CLUSTERS, Rates
from ds_terapipe.plan.evaluate import StepTimes
from ds_terapipe.plan.paper.published import CALIBRATED, SETTINGS, Figure, Setting, figures
from ds_terapipe.plan.result import compact
from ds_terapipe.plan.slices import Cuts, best_cut, slice_times

_CLUSTER = CLUSTERS["p3.16xlarge"]


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """Published and simulated times.

    Attributes:
        figures: each published time with the simulator's.
        settings: speedup by slices in each setting, published and simulated, and our own best slices of one sequence.
        rates: the rates of the cost.
    """

    figures: list[dict[str, Any]]
    settings: list[dict[str, Any]]
    rates: Rates

    @property
    def held_out_mean_error(self) -> float:
        """Mean of |ln(simulated / published)| over the times that were read and did not calibrate."""
        held_out = [abs(_error(each)) for each in self.figures if _held_out(each)]
        return sum(held_out) / len(held_out)

    def as_json(self) -> dict[str, Any]:
        """The figures of `table`, in JSON's types."""
        return {"figures": self.figures, "settings": self.settings, "held_out_mean_error": self.held_out_mean_error}

    def table(self) -> str:
        """Return all figures, speedups and rates as text, at most 130 columns wide."""
        lines = [
            f"{'set':>3}  {'model':<9}  {'run':<7}  {'L':>4}  {'published':>9}  {'simulated':>9}  {'error':>6}  time is    slices"
        ]
        for each in self.figures:
            use = "calibrates" if each["calibration"] else each["source"]
            lines.append(
                f"{each['setting']:>3}  {SETTINGS[each['setting'] - 1].model.name:<9}  {each['kind']:<7}  "
                f"{each['seq_length']:>4}  {each['published_s']:>7.3f} s  {each['simulated_s']:>7.3f} s  "
                f"{_error(each):>+7.3f}  {use:<10} {_spaced(each['slices'])}"
            )
        lines += [
            f"mean of |ln(simulated / published)|: {self.held_out_mean_error:.3f} over the "
            f"{sum(map(_held_out, self.figures))} times that were read and did not calibrate",
            "",
            "set  speedup published  simulated   own best  own slices of a sequence",
        ]
        for each in self.settings:
            lines.append(
                f"{each['setting']:>3}  {each['speedup_published']:>16.2f}x  {each['speedup_simulated']:>8.2f}x  "
                f"{each['own_best_s']:>7.3f} s  {_spaced(each['own_best_slices'])}"
            )
        lines += ["", f"{'rate':<22}  {'value':>8}  {'datasheet':>20}  why"]
        for name, known in _CLUSTER.ranges.items():
            value = getattr(self.rates, name)
            lines.append(f"{name:<22}  {value:>8.3g}  {f'{known.low:.3g} to {known.high:.3g}':>20}  {known.why}")
        return "\n".join(lines)


def reproduce(calibrated: bool = True, granularity: int = 8) -> Reproduction:
    """Simulate all published steps and plan our own slices; some seconds on one core.

    Args:
        calibrated: False leaves all rates at the middle of the datasheet's ranges: then all times are predictions.
        granularity: tokens by which our own slices differ from each other, as in the paper.
    """
    rates = CALIBRATED if calibrated else _CLUSTER.rates
    found, settings = [], []
    times: dict[tuple[int, str], tuple[Figure, float]] = {}
    for figure in figures():
        seconds = simulated(figure, rates)
        times[figure.setting.number, figure.kind] = figure, seconds
        found.append(
            {
                "setting": figure.setting.number,
                "kind": figure.kind,
                "seq_length": figure.seq_length,
                "slices": list(figure.slices),
                "published_s": figure.published_s,
                "simulated_s": seconds,
                "calibration": calibrated and figure.calibrates,
                "source": figure.source,
            }
        )
    for setting in SETTINGS:
        (whole, whole_s), (cut, cut_s) = (times[setting.number, kind] for kind in ("without", "with"))
        best_s, best = min((best_slices(cut, rates, granularity), (cut_s, cut.slices)), key=lambda each: each[0])
        settings.append(
            {
                "setting": setting.number,
                "speedup_published": whole.published_s / cut.published_s,
                "speedup_simulated": whole_s / cut_s,
                "own_best_s": best_s,
                "own_best_slices": list(best),
            }
        )
    return Reproduction(found, settings, rates)


def layout_cost(setting: Setting, rates: Rates) -> AnalyticCost:
    """The cost of one sequence at a time in a setting: equal stages, messages that block, as in the paper's runs."""
    layers = (setting.model.num_layers // setting.stages,) * setting.stages
    return AnalyticCost(setting.model, _CLUSTER, rates, layers, setting.tensor_parallel, blocking_messages=True)


def simulated(figure: Figure, rates: Rates) -> float:
    """Seconds of a step by the simulator, the optimiser's part included."""
    setting = figure.setting
    cost = layout_cost(setting, rates)
    step = StepTimes(cost, setting.stages, figure.sequences).seconds("terapipe", figure.slices)
    return step + cost.step_overhead(setting.data_parallel)


def best_slices(figure: Figure, rates: Rates, granularity: int) -> tuple[float, tuple[int, ...]]:
    """Return our own slices for the layout and sequences of a published step, and its seconds.

    TeraPipe's dynamic programme takes forward and backward of a slice together. A step has a slowest forward and a slowest
    backward, which may be of different slices, so the paper's own slices can win by a hair: then they are the best.
    """
    cuts = Cuts(figure.seq_length, granularity)
    # All stages are equal, so one of them says what a slice costs.
    times = slice_times(layout_cost(figure.setting, rates), 1, cuts)
    slices = cuts.lengths(best_cut(times, (figure.setting.stages - 1) / figure.sequences).counts)
    return simulated(dataclasses.replace(figure, slices=slices), rates), slices


def _error(figure: Mapping[str, Any]) -> float:
    return math.log(figure["simulated_s"] / figure["published_s"])


def _held_out(figure: Mapping[str, Any]) -> bool:
    return figure["source"] == "read" and not figure["calibration"]


def _spaced(slices: Sequence[int]) -> str:
    return compact(slices).replace(",", "")
