"""LAMB in float64, one switch per way in which implementations differ, and what a step of the op is held against.

The switches stand for the columns of a comparison of published implementations. The defaults are the paper's algorithm 2
(arXiv 1904.00962 v5).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

LR, BETA1, BETA2, EPS, DECAY = 0.01, 0.9, 0.999, 1e-6, 0.01
SHAPES = ((24, 33), (257,), (3, 5, 2, 2), (1,), (40, 7))
GRADIENT_SIZES = (1e-2, 1e-2, 3e-3, 1e-2, 1e-6)
"""The last layer's gradients are of the size of eps, where it counts how eps is added."""
SCALE = 1024.0
MAX_GRAD_NORM = 0.3
"""The norms of the gradients are between 0.03 and 3: some steps clip, others do not."""
STEP_TOLERANCE = 2e-6
"""Some twenty roundings of 6e-8 each lie between a gradient and a step, most of them random."""
RATIO_TOLERANCE = 1e-6


class Switches(NamedTuple):
    """The choices of an implementation.

    Attributes:
        correction: "moments" before the norms, "step" on the learning rate after them, "none".
        decay_in_norm: whether the decay is part of the update whose norm is taken.
        grad_averaging: whether the gradient enters the first moment times 1 - beta1.
        clamps_weight: take the ratio's clamp for the weight norm's.
        adapt: "all", "decayed" (groups with decay), "none".
        norm: 2, or 1 for sums of absolute values.
        clip: "unscaled" takes the loss scale off before it clips, "scaled" compares the scaled norm, "off" never clips.
        norm_share: part of every layer, from its start, whose norms are taken.
    """

    correction: str = "moments"
    eps_inside_sqrt: bool = False
    decay_in_norm: bool = True
    grad_averaging: bool = True
    min_coeff: float = 0.0
    max_coeff: float = math.inf
    min_weight_norm: float = 0.0
    max_weight_norm: float = math.inf
    clamps_weight: bool = False
    adapt: str = "all"
    norm: int = 2
    clip: str = "unscaled"
    step_offset: int = 0
    norm_share: float = 1.0


PAPER = Switches()


class Oracle:
    """The moments of some layers, in float64 from the first step on.

    The parameters are not kept: each step starts from those that it is given, so that the rounding of stored parameters
    does not add up, and an error is that of one step.
    """

    def __init__(
        self, switches: Switches = PAPER, decay: float = DECAY, max_norm: float = 0.0, scale: float = 1.0,
        excluded: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self.switches, self.decay, self.max_norm, self.scale = switches, decay, max_norm, scale
        self.excluded, self.steps = excluded, 0
        self.moments: list[tuple[Tensor, Tensor]] = []

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """The parameters after the step and the trust ratios, from parameters and gradients with the loss scale in them."""
        if not self.moments:
            self.moments = [(torch.zeros_like(p).double(), torch.zeros_like(p).double()) for p in parameters]
        self.steps += 1
        factor = 1 / self.scale
        if self.max_norm and self.switches.clip != "off":
            norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
            norm *= factor if self.switches.clip == "unscaled" else 1.0
            factor *= min(1.0, self.max_norm / (norm + 1e-6))
        found = [
            self._layer(p.double(), g.double() * factor, *moments, bool(self.excluded) and self.excluded[i])
            for i, (p, g, moments) in enumerate(zip(parameters, gradients, self.moments, strict=True))
        ]
        return [new for new, _ in found], [ratio for _, ratio in found]

    def _layer(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, excluded: bool) -> tuple[Tensor, float]:
        switches = self.switches
        m.mul_(BETA1).add_(g * (1 - BETA1 if switches.grad_averaging else 1.0))
        v.mul_(BETA2).add_(g * g * (1 - BETA2))
        t = self.steps + switches.step_offset
        rest1, rest2 = 1 - BETA1**t, 1 - BETA2**t
        if switches.correction == "moments":
            m, v = m / rest1, v / rest2
        adam = m / ((v + EPS).sqrt() if switches.eps_inside_sqrt else v.sqrt() + EPS)
        update = adam + (0.0 if excluded else self.decay) * p
        ratio = 1.0 if excluded else self._ratio(p, update if switches.decay_in_norm else adam)
        lr = LR * (math.sqrt(rest2) / rest1 if switches.correction == "step" else 1.0)
        return p - lr * ratio * update, ratio

    def _ratio(self, p: Tensor, update: Tensor) -> float:
        s = self.switches
        weight, change = self._norm(p), self._norm(update)
        if s.adapt == "none" or (s.adapt == "decayed" and self.decay == 0) or not weight or not change:
            return 1.0
        if s.clamps_weight:
            return min(max(weight, s.min_coeff), s.max_coeff) / change
        weight = min(max(weight, s.min_weight_norm), s.max_weight_norm)
        return min(max(weight / change, s.min_coeff), s.max_coeff)

    def _norm(self, x: Tensor) -> float:
        x = x.reshape(-1)[: max(1, int(x.numel() * self.switches.norm_share))]
        return x.abs().sum().item() if self.switches.norm == 1 else x.square().sum().sqrt().item()


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


def ratio_error(got: float, expected: float) -> float:
    """Relative error of a trust ratio."""
    return abs(got - expected) / abs(expected)


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Layers of :data:`SHAPES`, always the same."""
    generator = torch.Generator().manual_seed(0)
    return [Parameter((torch.randn(shape, generator=generator) * 0.05).to(dtype)) for shape in SHAPES]


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> Iterator[list[Tensor]]:
    """Gradients with the loss scale in them; the norm of all of them changes from step to step by up to a hundred."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        size = SCALE * 10 ** torch.empty(()).uniform_(-1, 1, generator=generator).item()
        yield [
            (torch.randn(shape, generator=generator) * (size * typical)).to(dtype)
            for shape, typical in zip(SHAPES, GRADIENT_SIZES, strict=True)
        ]
