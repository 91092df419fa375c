"""Cost models for tests."""

from __future__ import annotations

import numpy as np


class ExampleCost:
    """t(l, c) = stage factor * (fixed + linear l + attention l (c + l)); messages linear."""

    def __init__(self, factors, fixed=1e-3, linear=1e-5, attention=3e-9, weights=0.0, link=0.0, sequences=1, rough=0.0):
        self.factors, self.sequences, self.max_length = list(factors), sequences, 1 << 16
        self.fixed, self.linear, self.attention = fixed, linear, attention
        self._weights, self._link, self._rough = weights, link, rough

    def forward(self, stage, length, context):
        base = self.fixed + self.sequences * length * (self.linear + self.attention * (context + length))
        # what a real kernel does at odd shapes, reproducibly
        rough = self._rough * np.abs(np.sin(12.9898 * length + 78.233 * context))
        return self.factors[stage] * (base + rough)

    def backward(self, stage, length, context):
        return 2 * self.forward(stage, length, context)

    def weights(self, stage, length):
        return self.factors[stage] * self._weights * length

    def message(self, boundary, length):
        return self._link * length


def compositions(total):
    """All ways to write ``total`` as a sum of positive parts, in every order."""
    yield (total,)
    for first in range(1, total):
        yield from ((first, *rest) for rest in compositions(total - first))
