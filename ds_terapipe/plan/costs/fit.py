"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def nonnegative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 that minimises ``|matrix x - target|``.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23): coefficients are freed one
    by one where that lowers the error, and held at 0 again when they would turn negative.

    Args:
        matrix: [m, n].
        target: [m].

    Returns:
        [n], none negative.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    count = scaled.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 1e-12 * max(float(np.linalg.norm(target)), 1e-300)
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ x)
        if np.all(free) or np.max(gradient[~free]) <= tolerance:
            break
        free[int(np.argmax(np.where(free, -np.inf, gradient)))] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if np.all(trial[free] > 0):
                break
            # as far towards the trial as all stay positive; those that reach 0 are held there
            bad = free & (trial <= 0)
            step = np.min(x[bad] / np.maximum(x[bad] - trial[bad], 1e-300))
            x = x + step * (trial - x)
            free &= x > tolerance
            x[~free] = 0.0
        x = trial
    return np.asarray(x / scale, dtype=float)
