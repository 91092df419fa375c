"""Rates from a few published or measured step times, kept near the datasheet: regularised least squares on logarithms.

Nine rates cannot be known from seven times. What the times do not say stays where the datasheet puts it: each rate's
logarithm has a normal prior in the middle of its `hardware.Range`, as wide as the range, and each time's logarithm a normal
error of `NOISE`. The fit is the most likely set of rates (Levenberg-Marquardt). Which times are worth having is a question
that the model answers before any of them is looked at: `most_informative`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ds_terapipe.plan.costs.hardware import Range, Rates

Floats: TypeAlias = NDArray[np.float64]

# Relative error expected of a time: scatter of the measurement (0.1 to 10% in the paper) and what the formula leaves out.
NOISE = 0.05
_STEP = 1e-5  # of a logarithm, in differences
_LEAST_GAIN = 1e-12
_MOST_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Fit:
    """Result of `fit`.

    Attributes:
        rates: the most likely rates.
        shifts: by rate, how far it went from the middle of its range, in widths of the prior.
        errors: ln(predicted / observed) of each time.
    """

    rates: Rates
    shifts: dict[str, float]
    errors: list[float]


def fit(predict: Callable[[Rates], Sequence[float]], observed: Sequence[float], ranges: Mapping[str, Range]) -> Fit:
    """The most likely rates, given times and where the rates must lie.

    Args:
        predict: seconds that the model predicts for each observed time.
        observed: seconds.
        ranges: prior of each rate, by name.
    """
    names = list(ranges)
    middle, widths = _prior(ranges)
    target = np.log(np.asarray(observed, dtype=float))

    def residuals(logs: Floats) -> Floats:
        predicted = np.log(np.asarray(predict(_rates(names, logs)), dtype=float))
        return np.concatenate([(predicted - target) / NOISE, (logs - middle) / widths])

    logs, damping = middle.copy(), 1e-3
    now = residuals(logs)
    for _ in range(_MOST_STEPS):
        slopes = _slopes(residuals, logs)
        normal, gradient = slopes.T @ slopes, slopes.T @ now
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
        tried = residuals(logs + step)
        gain = float(now @ now - tried @ tried)
        if gain > 0:
            logs, now, damping = logs + step, tried, damping / 3
        else:
            damping *= 4
        # The maximum in the cost makes kinks, at which steps shrink without the gradient's going to zero.
        if abs(gain) < _LEAST_GAIN * max(1.0, float(now @ now)) or float(np.abs(step).max()) < 1e-10:
            break
    shifts = dict(zip(names, ((logs - middle) / widths).tolist(), strict=True))
    return Fit(_rates(names, logs), shifts, (now[: len(target)] * NOISE).tolist())


def sensitivities(predict: Callable[[Rates], Sequence[float]], ranges: Mapping[str, Range]) -> Floats:
    """d ln(time) / d ln(rate) at the middle of the ranges, [times, rates]."""
    names = list(ranges)
    return _slopes(lambda logs: np.log(np.asarray(predict(_rates(names, logs)), dtype=float)), _prior(ranges)[0])


def most_informative(
    slopes: Floats, candidates: Sequence[int], wanted: Sequence[int], count: int, ranges: Mapping[str, Range]
) -> list[int]:
    """The ``count`` candidates after whose measurement the wanted times are expected to be known best.

    That is the least mean variance of the wanted times' logarithms after a fit, by the linearised model (Bayesian
    V-optimal design). It depends on the model, the ranges and `NOISE`, and on no measured time.

    Args:
        slopes: from `sensitivities`, [times, rates].
        candidates: rows that may be measured; all choices of ``count`` of them are compared.
        wanted: rows that are to be predicted.

    Returns:
        The chosen rows, ascending.
    """
    _, widths = _prior(ranges)
    # In units of the prior, where its precision is the identity.
    scaled = slopes * widths
    goal = scaled[list(wanted)].T @ scaled[list(wanted)]
    known = np.einsum("ij,ik->ijk", scaled, scaled) / NOISE**2
    choices = np.array(list(itertools.combinations(sorted(candidates), count)))
    precision = np.tile(np.eye(len(widths)), (len(choices), 1, 1))
    for column in choices.T:
        precision += known[column]
    variance = np.einsum("nij,ji->n", np.linalg.inv(precision), goal)
    return [int(row) for row in choices[int(np.argmin(variance))]]


def _prior(ranges: Mapping[str, Range]) -> tuple[Floats, Floats]:
    known = list(ranges.values())
    return np.log([entry.middle for entry in known]), np.array([entry.width for entry in known])


def _rates(names: Sequence[str], logs: Floats) -> Rates:
    return Rates(**dict(zip(names, np.exp(logs).tolist(), strict=True)))


def _slopes(function: Callable[[Floats], Floats], at: Floats) -> Floats:
    columns = []
    for unit in np.eye(len(at)):
        columns.append((function(at + _STEP * unit) - function(at - _STEP * unit)) / (2 * _STEP))
    return np.stack(columns, axis=1)
