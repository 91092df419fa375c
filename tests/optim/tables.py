"""Tables for a back end made by hand, and the formula of csrc/lamb/segment.h in float64 over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.optim.op.segments import Tables

ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT = 1, 2, 4, 8
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
GUARD = 5
SENTINEL = 777.0


@dataclass(frozen=True)
class Rule:
    """The columns of a rule, as in csrc/lamb/segment.h."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    beta3: float = 0.1
    eps: float = 1e-6
    weight_decay: float = 0.01
    step: float = 3.0
    min_coeff: float = 0.0
    max_coeff: float = math.inf
    min_weight_norm: float = 0.0
    max_weight_norm: float = math.inf
    flags: float = ADAPT | CORRECT_MOMENTS

    def row(self) -> list[float]:
        return list(vars(self).values())


@dataclass
class Run:
    """One segment: five one-dimensional tensors of equal length, the last None for no copy."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None = None
    layer: int = 0
    rule: int = 0
    counted: bool = True

    def tensors(self) -> list[Tensor]:
        kept = [self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq]
        return kept if self.copy is None else [*kept, self.copy]

    def row(self) -> list[int]:
        types = (
            self.rule | NUMBERS[self.parameter.dtype] << 16 | NUMBERS[self.gradient.dtype] << 20 | self.counted << 28
        )
        copy = 0
        if self.copy is not None:
            types |= NUMBERS[self.copy.dtype] << 24
            copy = self.copy.data_ptr()
        addresses = [t.data_ptr() for t in (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)]
        return [*addresses, copy, self.parameter.numel(), self.layer, types]


def guarded(values: Tensor, dtype: torch.dtype, offset: int) -> Tensor:
    """``values`` as a view that begins ``offset`` elements into its storage and has GUARD more behind it."""
    storage = torch.full((offset + values.numel() + GUARD,), SENTINEL, dtype=dtype)
    view = storage[offset : offset + values.numel()]
    view.copy_(values)
    return view


def guards_hold(view: Tensor) -> bool:
    """Whether nothing before or behind the view was written."""
    storage = torch.as_strided(view, (view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
    start = view.storage_offset()
    around = torch.cat([storage[:start], storage[start + view.numel() :]])
    return bool((around == SENTINEL).all())


def random_run(
    elements: int,
    seed: int,
    *,
    types: tuple[torch.dtype, torch.dtype, torch.dtype | None] = (torch.float32, torch.float32, None),
    offset: int = 0,
    scale: float = 1.0,
    **settings: int,
) -> Run:
    """A segment in the middle of a training: moments of the gradients' size, parameters around ``scale``."""
    random = np.random.default_rng(seed)
    parameter = torch.from_numpy(random.standard_normal(elements) * scale)
    gradient = torch.from_numpy(random.standard_normal(elements) * 1e-2)
    exp_avg = torch.from_numpy(random.standard_normal(elements) * 1e-2)
    exp_avg_sq = torch.from_numpy(random.standard_normal(elements) ** 2 * 1e-4)
    copy = None if types[2] is None else guarded(torch.zeros(elements), types[2], offset)
    return Run(
        guarded(parameter, types[0], offset),
        guarded(gradient, types[1], offset),
        guarded(exp_avg, torch.float32, offset),
        guarded(exp_avg_sq, torch.float32, offset),
        copy,
        **settings,
    )


def tables_of(runs: Sequence[Run], rules: Sequence[Rule], layers: int) -> Tables:
    """The tables that a back end is given."""
    segments = torch.tensor([run.row() for run in runs], dtype=torch.int64).reshape(-1, 8)
    return Tables(segments, torch.tensor([rule.row() for rule in rules], dtype=torch.float64).reshape(-1, 12), layers)


def cloned(runs: Sequence[Run]) -> list[Run]:
    """The same values at the same distance from a 64-byte boundary, in new memory."""
    return [replace(run, **{name: _clone(getattr(run, name)) for name in _TENSORS}) for run in runs]


_TENSORS = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "copy")


def _clone(view: Tensor | None) -> Tensor | None:
    return None if view is None else guarded(view, view.dtype, view.storage_offset())


@dataclass
class Expected:
    """What a step makes, float64: one entry per segment, but norms [L, 2] and ratios [L]."""

    parameter: list[Tensor]
    step: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    norms: Tensor
    ratios: Tensor


def reference(runs: Sequence[Run], rules: Sequence[Rule], layers: int, control: Sequence[float]) -> Expected:
    """One step in float64, from what is stored. ``control`` has the sum of squares of the gradients in place."""
    scale, max_norm, squares, _ = control
    factor = scale * (min(1.0, max_norm / (scale * math.sqrt(squares) + 1e-6)) if max_norm > 0 else 1.0)
    result = Expected(
        [], [], [], [], torch.zeros(layers, 2, dtype=torch.float64), torch.ones(layers, dtype=torch.float64)
    )
    updates = []
    for run in runs:
        rule, p, g = rules[run.rule], run.parameter.double(), run.gradient.double() * factor
        m = rule.beta1 * run.exp_avg.double() + rule.beta3 * g
        v = rule.beta2 * run.exp_avg_sq.double() + (1 - rule.beta2) * g * g
        updates.append(update(rule, p, m, v))
        result.exp_avg.append(m)
        result.exp_avg_sq.append(v)
        result.norms[run.layer] += torch.stack([p.square().sum(), updates[-1].square().sum()])
    for run, u in zip(runs, updates, strict=True):
        rule = rules[run.rule]
        ratio = trust_ratio(rule, *result.norms[run.layer].tolist())
        size = rule.lr * ratio
        if int(rule.flags) & CORRECT_STEP:
            size *= math.sqrt(1 - rule.beta2**rule.step) / (1 - rule.beta1**rule.step)
        if run.parameter.numel():
            result.ratios[run.layer] = ratio
        result.step.append(size * u)
        result.parameter.append(run.parameter.double() - size * u)
    return result


def update(rule: Rule, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """u of the formula."""
    flags = int(rule.flags)
    if flags & CORRECT_MOMENTS:
        m, v = m / (1 - rule.beta1**rule.step), v / (1 - rule.beta2**rule.step)
    divisor = (v + rule.eps).sqrt() if flags & EPS_INSIDE_SQRT else v.sqrt() + rule.eps
    return m / divisor + rule.weight_decay * p


def trust_ratio(rule: Rule, weight_square: float, update_square: float) -> float:
    """The ratio of the formula, from the sums of squares."""
    if not int(rule.flags) & ADAPT or weight_square == 0 or update_square == 0:
        return 1.0
    weight = min(max(math.sqrt(weight_square), rule.min_weight_norm), rule.max_weight_norm)
    return min(max(weight / math.sqrt(update_square), rule.min_coeff), rule.max_coeff)
