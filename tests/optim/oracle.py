"""LAMB in float64: the paper's algorithm 2 (arXiv 1904.00962 v5), and a setting for each way in which other modes differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

LR, BETA1, BETA2, EPS, DECAY = 0.01, 0.9, 0.999, 1e-6, 0.01
SHAPES = ((24, 33), (257,), (3, 5, 2, 2), (1,), (40, 7))
# Those of the last layer are of the size of eps, where it counts how eps is added.
GRADIENT_SIZES = (1e-2, 1e-2, 3e-3, 1e-2, 1e-6)
# The norms of the gradients are between 0.03 and 3: some steps clip, others do not.
SCALE, MAX_GRAD_NORM = 1024.0, 0.3
# Some twenty roundings of 6e-8 each lie between a gradient and a step, most of them random.
STEP_TOLERANCE, RATIO_TOLERANCE = 2e-6, 1e-6


class Oracle:
    """The moments of some layers, in float64 from the first step on.

    The parameters are not kept: each step starts from those that it is given, so that the rounding of stored parameters
    does not add up, and an error is that of one step.

    Args:
        max_norm: of all gradients after ``scale`` has been taken off; 0 for no clipping.
        correction: "moments" before the norms, "step" on the learning rate after them, "none".
        coefficients, weight_norms: least and largest ratio, and weight norm.
        excludes: whether vectors have neither decay nor ratio.
    """

    def __init__(
        self, max_norm: float = 0.0, scale: float = 1.0, decay: float = DECAY, correction: str = "moments",
        eps_inside: bool = False, averages: bool = True, coefficients: tuple[float, float] = (0.0, math.inf),
        weight_norms: tuple[float, float] = (0.0, math.inf), adapts: bool = True, excludes: bool = False,
    ) -> None:  # fmt: skip
        self.max_norm, self.scale, self.decay, self.correction = max_norm, scale, decay, correction
        self.eps_inside, self.averages, self.adapts, self.excludes = eps_inside, averages, adapts, excludes
        self.coefficients, self.weight_norms, self.steps = coefficients, weight_norms, 0
        self.moments: list[tuple[Tensor, Tensor]] = []

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """The parameters after the step and the trust ratios, from parameters and gradients with the loss scale in them."""
        self.moments = self.moments or [
            (torch.zeros_like(p).double(), torch.zeros_like(p).double()) for p in parameters
        ]
        self.steps += 1
        factor = 1 / self.scale
        if self.max_norm:
            norm = factor * math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
            factor *= min(1.0, self.max_norm / (norm + 1e-6))
        pairs = zip(parameters, gradients, self.moments, strict=True)
        found = [self._layer(p.double(), g.double() * factor, m, v) for p, g, (m, v) in pairs]
        return [new for new, _ in found], [ratio for _, ratio in found]

    def _layer(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, float]:
        m.mul_(BETA1).add_(g * (1 - BETA1 if self.averages else 1.0))
        v.mul_(BETA2).add_(g * g * (1 - BETA2))
        rest1, rest2 = 1 - BETA1**self.steps, 1 - BETA2**self.steps
        if self.correction == "moments":
            m, v = m / rest1, v / rest2
        excluded = self.excludes and p.dim() <= 1
        update = m / ((v + EPS).sqrt() if self.eps_inside else v.sqrt() + EPS) + (0.0 if excluded else self.decay) * p
        weight, change = p.square().sum().sqrt().item(), update.square().sum().sqrt().item()
        ratio = 1.0
        if self.adapts and not excluded and weight and change:
            ratio = _within(_within(weight, self.weight_norms) / change, self.coefficients)
        lr = LR * (math.sqrt(rest2) / rest1 if self.correction == "step" else 1.0)
        return p - lr * ratio * update, ratio


def _within(value: float, limits: tuple[float, float]) -> float:
    return min(max(value, limits[0]), limits[1])


def step_error(before: Tensor, after: Tensor, expected: Tensor) -> float:
    """How wrong a step is, relative to the layer's largest step, beyond the rounding of the stored fp32 parameter.

    Half a unit in the last place of an fp32 number x is at most 6e-8 \\|x\\|: no op that stores fp32 can be nearer.
    """
    before, after, expected = before.double(), after.double(), expected.double()
    if not before.numel():
        return 0.0
    error = ((after - expected).abs() - 6e-8 * torch.maximum(after.abs(), expected.abs())).clamp(min=0).max().item()
    step = (expected - before).abs().max().item()
    return error / step if step and math.isfinite(error) else (math.inf if error else 0.0)


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Layers of :data:`SHAPES`, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [Parameter((torch.randn(shape, generator=generator) * 0.05).to(dtype)) for shape in SHAPES]


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> Iterator[list[Tensor]]:
    """Gradients with the loss scale in them; the norm of all of them changes from step to step by up to a hundred."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        size = SCALE * 10 ** torch.empty(()).uniform_(-1, 1, generator=generator).item()
        sizes = zip(SHAPES, GRADIENT_SIZES, strict=True)
        yield [(torch.randn(shape, generator=generator) * (size * typical)).to(dtype) for shape, typical in sizes]
