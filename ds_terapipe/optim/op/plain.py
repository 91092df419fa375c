"""The back end in PyTorch, for machines without a compiler: the formula of csrc/lamb/segment.h, segment by segment."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_terapipe.optim.modes import ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT, Rule
from ds_terapipe.optim.op.segments import COUNTED, KIND, LAYER, LENGTH, Tables, View

SCALE, MAX_NORM, SQUARES, FOUND_INF = range(4)
FLOAT32 = torch.finfo(torch.float32)


class Plain:
    """The functions of a back end in PyTorch; see ds_terapipe/optim/op/backends.py for their arguments."""

    name = "plain"
    takes_views = True

    def square_sum(self, tables: Tables, control: Tensor) -> None:
        """Add the squares of the counted gradients to ``control[2]``; set ``control[3]`` to 1 if any is nan or inf."""
        for segment, view in _segments(tables):
            square = view.gradient.double().square().sum().item()
            # The square of a finite fp32 is finite in fp64, and so is any sum of them that a machine can hold.
            if not math.isfinite(square):
                control[FOUND_INF] = 1
            if segment[KIND] >> COUNTED & 1:
                control[SQUARES] += square

    def moments(self, tables: Tables, norms: Tensor, control: Tensor) -> None:
        """Update the moments, and write the sums of squares of parameter and update per layer, float64 [L, 2]."""
        if control[FOUND_INF] != 0:
            return
        factor = gradient_factor(control)
        rules = _rules(tables)
        norms.zero_()
        for segment, view in _segments(tables):
            rule = rules[segment[KIND] & 0xFFFF]
            gradient = view.gradient.float() * factor
            if rule.beta3 == 1 - rule.beta1:
                view.exp_avg.lerp_(gradient, rule.beta3)
            else:
                view.exp_avg.mul_(rule.beta1).add_(gradient, alpha=rule.beta3)
            # In this form the rounding of beta2 to fp32 does not add up over the steps. An infinite v would never come back, and
            # a share of g^2 fits into fp32 where g^2 itself does not.
            view.exp_avg_sq.sub_(view.exp_avg_sq, alpha=1 - rule.beta2)
            view.exp_avg_sq.addcmul_(gradient * (1 - rule.beta2), gradient).clamp_(max=FLOAT32.max)
            if rule.has(ADAPT):
                parameter = view.parameter.float()
                squares = norms[segment[LAYER]]
                squares[0] += parameter.double().square().sum()
                squares[1] += update(rule, view, parameter).double().square().sum()

    def apply(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """Write the trust ratio of every layer, float64 [L], the new parameters, and their copies."""
        if control[FOUND_INF] != 0:
            return
        rules = _rules(tables)
        ratios.fill_(1.0)
        squares = norms.tolist()
        for segment, view in _segments(tables):
            rule = rules[segment[KIND] & 0xFFFF]
            ratio = trust_ratio(rule, *squares[segment[LAYER]])
            ratios[segment[LAYER]] = ratio
            parameter = view.parameter.float()
            parameter = parameter.sub(update(rule, view, parameter), alpha=step_size(rule) * ratio)
            view.parameter.copy_(parameter)
            if view.copy is not None:
                view.copy.copy_(parameter)

    def step(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """Both phases, for layers that are all local."""
        self.moments(tables, norms, control)
        self.apply(tables, norms, control, ratios)


def gradient_factor(control: Tensor) -> float:
    """Return the factor of the gradients: the unscaling and the clipping of the global norm."""
    scale, max_norm, squares, _ = control.tolist()
    if max_norm <= 0:
        return float(scale)
    return float(scale * min(1.0, max_norm / (scale * math.sqrt(squares) + 1e-6)))


def update(rule: Rule, view: View, parameter: Tensor) -> Tensor:
    """The update before the trust ratio, fp32, from the moments as they are and the parameter in fp32."""
    corrects = rule.has(CORRECT_MOMENTS)
    correction1 = 1 - rule.beta1**rule.step if corrects else 1.0
    correction2 = 1 - rule.beta2**rule.step if corrects else 1.0
    if rule.has(EPS_INSIDE_SQRT):
        divisor = view.exp_avg_sq.div(correction2).add_(rule.eps).sqrt_()
    else:
        divisor = view.exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(rule.eps)
    # The divisor is never zero, so that eps = 0 gives 0 where nothing has ever moved.
    result = view.exp_avg.div(correction1).div_(divisor.clamp_(min=FLOAT32.tiny))
    return result.add_(parameter, alpha=rule.weight_decay)


def trust_ratio(rule: Rule, weight_square: float, update_square: float) -> float:
    """The layer's trust ratio from the sums of squares of its parameters and of its update."""
    if not rule.has(ADAPT) or not (weight_square > 0 and update_square > 0):
        return 1.0
    weight = min(max(math.sqrt(weight_square), rule.min_weight_norm), rule.max_weight_norm)
    return min(max(weight / math.sqrt(update_square), rule.min_coeff), rule.max_coeff)


def step_size(rule: Rule) -> float:
    """The learning rate, with DeepSpeed's bias correction where the rule has it."""
    if not rule.has(CORRECT_STEP):
        return rule.lr
    return float(rule.lr * math.sqrt(1 - rule.beta2**rule.step) / (1 - rule.beta1**rule.step))


def _rules(tables: Tables) -> list[Rule]:
    return [Rule(*row) for row in tables.rules.tolist()]


def _segments(tables: Tables) -> list[tuple[list[int], View]]:
    rows = tables.segments.tolist()
    return [(row, view) for row, view in zip(rows, tables.views, strict=True) if row[LENGTH]]
