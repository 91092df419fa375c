"""LAMB in float64, one switch per way in which implementations differ, and what a step of the op is held against.

The switches stand for the columns of a comparison of published implementations: where the gradient is clipped, where the
bias is corrected, where eps is added, whether the decay is part of the norm, what multiplies the gradient in the first
moment, what is clamped, what is adapted. The defaults are the paper's algorithm 2 (arXiv 1904.00962 v5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Switches:
    """What an implementation does.

    Attributes:
        correction: "moments" before the norms, "step" on the learning rate after them, "none".
        eps_inside_sqrt: sqrt(v + eps) in place of sqrt(v) + eps.
        decay_in_norm: whether the decay is part of the update whose norm is taken.
        grad_averaging: whether the gradient enters the first moment times 1 - beta1.
        min_coeff, max_coeff: clamp of the ratio.
        min_weight_norm, max_weight_norm: clamp of the weight norm.
        clamp_weight_norm_by_coeff: take the ratio's clamp for the weight norm's.
        adapt: "all", "decayed" (groups with decay), "none".
        norm: 2, or 1 for sums of absolute values.
        clip: "unscaled" takes the loss scale off before it clips, "scaled" compares the scaled norm, "off" never clips.
        step_offset: added to the number of the step.
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
    clamp_weight_norm_by_coeff: bool = False
    adapt: str = "all"
    norm: int = 2
    clip: str = "unscaled"
    step_offset: int = 0
    norm_share: float = 1.0


@dataclass(frozen=True)
class Settings:
    """The numbers of an optimizer."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    grad_scale: float = 1.0


@dataclass
class Oracle:
    """The moments of some layers, in float64 from the first step on.

    The parameters are not kept: each step starts from those that it is given, so that the rounding of stored parameters
    does not add up, and an error is that of one step.
    """

    settings: Settings
    switches: Switches = field(default_factory=Switches)
    excluded: Sequence[bool] = ()
    exp_avg: list[Tensor] = field(default_factory=list)
    exp_avg_sq: list[Tensor] = field(default_factory=list)
    steps: int = 0

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[float]]:
        """The parameters after the step, float64, and the trust ratios.

        Args:
            parameters: before it.
            gradients: as they come, with the loss scale in them.
        """
        if not self.exp_avg:
            self.exp_avg = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
            self.exp_avg_sq = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        self.steps += 1
        factor = self._gradient_factor(gradients)
        results, ratios = [], []
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            excluded = bool(self.excluded) and self.excluded[i]
            new, ratio = self._layer(i, parameter.double(), gradient.double() * factor, excluded)
            results.append(new)
            ratios.append(ratio)
        return results, ratios

    def _gradient_factor(self, gradients: Sequence[Tensor]) -> float:
        settings, unscaled = self.settings, 1.0 / self.settings.grad_scale
        if settings.max_grad_norm is None or self.switches.clip == "off":
            return unscaled
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        if self.switches.clip == "unscaled":
            norm *= unscaled
        return unscaled * min(1.0, settings.max_grad_norm / (norm + 1e-6))

    def _layer(self, index: int, p: Tensor, g: Tensor, excluded: bool) -> tuple[Tensor, float]:
        settings, switches = self.settings, self.switches
        m, v = self.exp_avg[index], self.exp_avg_sq[index]
        m.mul_(settings.beta1).add_(g * (1 - settings.beta1 if switches.grad_averaging else 1.0))
        v.mul_(settings.beta2).add_(g * g * (1 - settings.beta2))
        t = self.steps + switches.step_offset
        rest1, rest2 = 1 - settings.beta1**t, 1 - settings.beta2**t
        if switches.correction == "moments":
            m, v = m / rest1, v / rest2
        root = (v + settings.eps).sqrt() if switches.eps_inside_sqrt else v.sqrt() + settings.eps
        adam = m / root
        decay = (0.0 if excluded else settings.weight_decay) * p
        update = adam + decay
        ratio = 1.0 if excluded else self._ratio(p, update if switches.decay_in_norm else adam)
        lr = settings.lr * (math.sqrt(rest2) / rest1 if switches.correction == "step" else 1.0)
        return p - lr * ratio * update, ratio

    def _ratio(self, p: Tensor, update: Tensor) -> float:
        switches = self.switches
        if switches.adapt == "none" or (switches.adapt == "decayed" and self.settings.weight_decay == 0):
            return 1.0
        weight, change = self._norm(p), self._norm(update)
        if weight == 0 or change == 0:
            return 1.0
        if switches.clamp_weight_norm_by_coeff:
            return min(max(weight, switches.min_coeff), switches.max_coeff) / change
        weight = min(max(weight, switches.min_weight_norm), switches.max_weight_norm)
        return min(max(weight / change, switches.min_coeff), switches.max_coeff)

    def _norm(self, x: Tensor) -> float:
        x = x.reshape(-1)
        x = x[: max(1, int(x.numel() * self.switches.norm_share))] if x.numel() else x
        return x.abs().sum().item() if self.switches.norm == 1 else x.square().sum().sqrt().item()


def step_error(before: Tensor, after: Tensor, expected: Tensor) -> float:
    """How wrong a step is, relative to the layer's largest step, beyond the rounding of the stored fp32 parameter.

    Half a unit in the last place of an fp32 number x is at most 6e-8 \\|x\\|: no op that stores fp32 can be nearer.
    """
    before, after, expected = before.double(), after.double(), expected.double()
    if not before.numel():
        return 0.0
    step = (expected - before).abs().max().item()
    rounding = 6e-8 * torch.maximum(after.abs(), expected.abs())
    error = ((after - expected).abs() - rounding).clamp(min=0).max().item()
    if not math.isfinite(error):
        return math.inf
    return error / step if step else (math.inf if error else 0.0)


def ratio_error(got: float, expected: float) -> float:
    """Relative error of a trust ratio."""
    return abs(got - expected) / abs(expected)
