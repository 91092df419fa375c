"""LAMB in float64 by a row of the rules; the default is the paper's algorithm 2 (arXiv 1904.00962 v5)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim.modes import ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT

SHAPES = ((24, 33), (257,), (3, 5, 2, 2), (1,), (40, 7))
# Those of the last layer are of the size of eps, where it counts how eps is added.
GRADIENT_SIZES = (1e-2, 1e-2, 3e-3, 1e-2, 1e-6)
# The norms of the gradients are between 0.03 and 3: some steps clip, others do not.
SCALE, MAX_GRAD_NORM = 1024.0, 0.3
# Half the distance of neighbours, relative to a number and for subnormal ones: what storing the right result costs.
ROUNDING = {torch.float32: (2.0**-24, 0.0), torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 0.0)}
# Some twenty roundings of 6e-8 each lie between a gradient and a step, most of them random.
STEP_TOLERANCE, RATIO_TOLERANCE = 2e-6, 1e-6


class Rule(NamedTuple):
    """A row of the rules, columns of ``Rule`` in csrc/lamb/segment.h."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    beta3: float = 1 - 0.9
    eps: float = 1e-6
    weight_decay: float = 0.01
    step: float = 3.0
    min_coeff: float = 0.0
    max_coeff: float = math.inf
    min_weight_norm: float = 0.0
    max_weight_norm: float = math.inf
    flags: float = ADAPT | CORRECT_MOMENTS

    def has(self, flag: int) -> bool:
        return bool(int(self.flags) & flag)

    def moments(self, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.beta1 * m + self.beta3 * g, self.beta2 * v + (1 - self.beta2) * g * g

    def update(self, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        """Before the trust ratio."""
        if self.has(CORRECT_MOMENTS):
            m, v = m / (1 - self.beta1**self.step), v / (1 - self.beta2**self.step)
        root = (v + self.eps).sqrt() if self.has(EPS_INSIDE_SQRT) else v.sqrt() + self.eps
        return m / root + self.weight_decay * p

    def ratio(self, weight: float, change: float) -> float:
        """From the norms of parameter and update."""
        if not (self.has(ADAPT) and weight and change):
            return 1.0
        weight = min(max(weight, self.min_weight_norm), self.max_weight_norm)
        return min(max(weight / change, self.min_coeff), self.max_coeff)

    def size(self, ratio: float) -> float:
        corrects = self.has(CORRECT_STEP)
        return self.lr * ratio * (math.sqrt(1 - self.beta2**self.step) / (1 - self.beta1**self.step) if corrects else 1.0)


def gradient_factor(scale: float, max_norm: float, squares: float) -> float:
    """Factor that unscales gradients of this sum of squares and clips their norm."""
    return scale * min(1.0, max_norm / (scale * math.sqrt(squares) + 1e-6)) if max_norm > 0 else scale


class Oracle:
    """The moments of some layers, in float64 from the first step on.

    The parameters are not kept: each step starts from those that it is given, so that the rounding of stored parameters
    does not add up, and an error is that of one step.

    Args:
        max_norm: of all gradients after ``scale`` has been taken off; 0 for no clipping.
        excludes: whether vectors have neither decay nor ratio.
        rule: columns of the rules.
    """

    def __init__(self, max_norm: float = 0.0, scale: float = 1.0, excludes: bool = False, **rule: Any) -> None:
        self.max_norm, self.scale, self.excludes, self.rule = max_norm, scale, excludes, Rule(**{"step": 0.0, **rule})
        self.moments: list[tuple[Tensor, Tensor]] = []

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """The parameters after the step and the trust ratios, from parameters and gradients with the loss scale in them."""
        moments = self.moments or [(torch.zeros_like(p).double(), torch.zeros_like(p).double()) for p in parameters]
        squares = sum(gradient.double().square().sum().item() for gradient in gradients)
        factor = gradient_factor(1 / self.scale, self.max_norm, squares)
        self.rule, self.moments, found, ratios = self.rule._replace(step=self.rule.step + 1), [], [], []
        for p, gradient, (m, v) in zip(parameters, gradients, moments, strict=True):
            rule = self.rule
            if self.excludes and p.dim() <= 1:
                rule = rule._replace(weight_decay=0.0, flags=int(rule.flags) & ~ADAPT)
            self.moments.append(rule.moments(gradient.double() * factor, m, v))
            update = rule.update(p.double(), *self.moments[-1])
            ratios.append(rule.ratio(*(x.double().square().sum().sqrt().item() for x in (p, update))))
            found.append(p.double() - rule.size(ratios[-1]) * update)
        return found, ratios


def step_error(before: Tensor, after: Tensor, expected: Tensor) -> float:
    """Error of a step, relative to the layer's largest step, beyond the rounding of the stored parameter, or copy of it."""
    relative, subnormal = ROUNDING[after.dtype]
    before, after, expected = before.double(), after.double(), expected.double()
    if not before.numel():
        return 0.0
    rounding = (relative * torch.maximum(after.abs(), expected.abs())).clamp(min=subnormal)
    error = ((after - expected).abs() - rounding).clamp(min=0).max().item()
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
