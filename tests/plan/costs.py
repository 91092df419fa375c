"""Cost models for tests."""

import numpy as np


class ExampleCost:
    """t(l, c) = stage factor * (fixed + linear l + attention l (c + l)); messages linear."""

    def __init__(self, factors, fixed=1e-3, linear=1e-5, attention=3e-9, weights=0.0, link=0.0, sequences=1, rough=0.0):
        self.factors, self.sequences, self.max_length = list(factors), sequences, 1 << 16
        self.fixed, self.linear, self.attention = fixed, linear, attention
        self._weights, self._link, self._rough = weights, link, rough

    def forward(self, stage, length, context):
        base = self.fixed + self.sequences * length * (self.linear + self.attention * (context + length))
        rough = self._rough * np.abs(np.sin(12.9898 * length + 78.233 * context))  # a real kernel at odd shapes, reproducibly
        return self.factors[stage] * (base + rough)

    def backward(self, stage, length, context):
        return 2 * self.forward(stage, length, context)

    def weights(self, stage, length):
        return self.factors[stage] * self._weights * length

    def message(self, boundary, length):
        return self._link * length

    def of_length(self, length):
        return self


def compositions(total):
    """All ways to write ``total`` as a sum of positive parts, in every order."""
    yield (total,)
    for first in range(1, total):
        yield from ((first, *rest) for rest in compositions(total - first))


def sample_points(total, least):
    """A few dozen (length, context) that cover slices of ``least`` tokens or more of a sequence, up to the deepest context."""
    powers = [least * 2**i for i in range(total.bit_length())]
    lengths = sorted({n for power in powers for n in (power, 3 * power) if n < total} | {total})
    points = [(length, 0) for length in lengths]
    for length in sorted({least, *lengths[len(lengths) // 2 :: 3]} - {total}):
        deepest = total - length
        contexts = {deepest // 4 // least * least, deepest // 2 // least * least, deepest} - {0}
        points += [(length, context) for context in sorted(contexts)]
    return points
