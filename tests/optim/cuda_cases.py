"""Tables to try the CUDA back end with, and the same step in float64. Used on a GPU and on the emulation alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ds_terapipe.optim.op.segments import Tables

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT = 1, 2, 4, 8
GUARD = 16
GUARD_VALUE = 7.5
# Half of the last digit, relative to a number, and what is lost below the smallest normal number.
ROUNDING = {torch.float32: (6e-8, 0.0), torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 0.0)}


class Rule(NamedTuple):
    """A row of the rules, columns of ``Rule`` in csrc/lamb/segment.h."""

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    beta3: float = 1 - 0.9
    eps: float = 1e-6
    weight_decay: float = 0.01
    step: float = 1.0
    min_coeff: float = 0.0
    max_coeff: float = math.inf
    min_weight_norm: float = 0.0
    max_weight_norm: float = math.inf
    flags: float = ADAPT | CORRECT_MOMENTS


@dataclass(frozen=True)
class Run:
    """A segment to make.

    Attributes:
        shifts: elements by which parameter, gradient, exp_avg, exp_avg_sq and copy start after an address that a wide load
            could start from.
        scale: the size of parameter and gradient.
    """

    length: int
    layer: int
    rule: int = 0
    parameter: torch.dtype = torch.float32
    gradient: torch.dtype = torch.float32
    copy: torch.dtype | None = None
    shifts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    counted: bool = True
    scale: tuple[float, float] = (1.0, 1.0)


class Arrays(NamedTuple):
    """The tensors of one segment."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None


@dataclass
class Case:
    """Tensors, their tables, and the moments in float64.

    Attributes:
        buffers: the memory that the tensors lie in, with guards on both sides.
        exact: per segment, exp_avg and exp_avg_sq as float64 makes them of the same gradients.
    """

    runs: list[Run]
    rules: list[Rule]
    device: torch.device
    tables: Tables
    arrays: list[Arrays]
    buffers: list[tuple[Tensor, int, int]]
    norms: Tensor
    ratios: Tensor
    control: Tensor
    exact: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def guards_hold(self) -> bool:
        """Whether nothing was written beside the tensors."""
        return all(
            bool((buffer[:start] == GUARD_VALUE).all()) and bool((buffer[start + length :] == GUARD_VALUE).all())
            for buffer, start, length in self.buffers
        )

    def snapshot(self) -> list[Tensor]:
        """Copies of everything that a step may change."""
        tensors = [t for arrays in self.arrays for t in arrays if t is not None]
        return [t.clone() for t in (*tensors, self.norms, self.ratios, self.control, self.tables.rules)]

    def set_control(self, scale: float = 1.0, max_norm: float = 0.0, found_inf: float = 0.0) -> None:
        """What stands in ``control`` before a step."""
        self.control.copy_(torch.tensor([scale, max_norm, 0.0, found_inf], dtype=torch.float64))

    def set_step(self, step: int) -> None:
        """Number the next step."""
        self.rules = [rule._replace(step=float(step)) for rule in self.rules]
        self.tables.rules.copy_(torch.tensor(self.rules, dtype=torch.float64))

    def new_gradients(self, seed: int) -> None:
        """Other gradients in the same memory."""
        generator = torch.Generator().manual_seed(seed)
        for run, arrays in zip(self.runs, self.arrays, strict=True):
            arrays.gradient.copy_(run.scale[1] * torch.randn(run.length, generator=generator))


def make(runs: Sequence[Run], rules: Sequence[Rule], layers: int, device: str = "cpu", seed: int = 0) -> Case:
    """The tensors of a case, with moments zero."""
    place = torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    buffers: list[tuple[Tensor, int, int]] = []
    arrays, rows = [], []
    for run in runs:
        types = (run.parameter, run.gradient, torch.float32, torch.float32, run.copy)
        tensors: list[Tensor | None] = []
        for dtype, shift in zip(types, run.shifts, strict=True):
            if dtype is None:
                tensors.append(None)
                continue
            # PyTorch's own addresses are multiples of 64 bytes, and so is the guard.
            start = GUARD * 2 + shift
            buffer = torch.full((start + run.length + GUARD,), GUARD_VALUE, dtype=dtype, device=place)
            buffers.append((buffer, start, run.length))
            tensors.append(buffer[start : start + run.length])
        made = Arrays(*tensors)  # type: ignore[arg-type]
        made.parameter.copy_(run.scale[0] * torch.randn(run.length, generator=generator))
        made.gradient.copy_(run.scale[1] * torch.randn(run.length, generator=generator))
        made.exp_avg.zero_()
        made.exp_avg_sq.zero_()
        arrays.append(made)
        kind = run.rule | TYPES[run.parameter] << 16 | TYPES[run.gradient] << 20 | run.counted << 28
        kind |= TYPES[run.copy or torch.float32] << 24
        addresses = [0 if t is None else t.data_ptr() for t in made]
        rows.append([*addresses, run.length, run.layer, kind])
    tables = Tables(
        torch.tensor(rows, dtype=torch.int64).reshape(-1, 8),
        torch.tensor(rules, dtype=torch.float64, device=place),
        layers,
    )
    case = Case(
        list(runs), list(rules), place, tables, arrays, buffers,
        torch.full((layers, 2), 99.0, dtype=torch.float64, device=place),
        torch.full((layers,), 99.0, dtype=torch.float64, device=place),
        torch.zeros(4, dtype=torch.float64, device=place),
    )  # fmt: skip
    case.exact = [(a.exp_avg.double(), a.exp_avg_sq.double()) for a in arrays]
    case.set_control()
    return case


class Expected(NamedTuple):
    """What float64 makes of one step."""

    parameters: list[Tensor]
    norms: Tensor
    ratios: Tensor
    square_sum: float


def oracle(case: Case) -> Expected:
    """One step in float64 from the parameters as they are; the case's exact moments move on."""
    squares = [a.gradient.double().square().sum().item() for a in case.arrays]
    total = sum(s for s, run in zip(squares, case.runs, strict=True) if run.counted)
    scale, max_norm = case.control[:2].tolist()
    factor = scale
    if max_norm > 0:
        factor = scale * min(1.0, max_norm / (scale * math.sqrt(total) + 1e-6))
    norms = torch.zeros_like(case.norms)
    updates, exact = [], []
    for run, arrays, (m, v) in zip(case.runs, case.arrays, case.exact, strict=True):
        rule = case.rules[run.rule]
        flags = int(rule.flags)
        gradient, parameter = arrays.gradient.double() * factor, arrays.parameter.double()
        m = rule.beta1 * m + rule.beta3 * gradient
        v = rule.beta2 * v + (1 - rule.beta2) * gradient.square()
        exact.append((m, v))
        corrects = bool(flags & CORRECT_MOMENTS)
        m_hat = m / (1 - rule.beta1**rule.step) if corrects else m
        v_hat = v / (1 - rule.beta2**rule.step) if corrects else v
        divisor = (v_hat + rule.eps).sqrt() if flags & EPS_INSIDE_SQRT else v_hat.sqrt() + rule.eps
        update = m_hat / divisor + rule.weight_decay * parameter
        updates.append(update)
        norms[run.layer] += torch.stack([parameter.square().sum(), update.square().sum()])
    case.exact = exact
    ratios = torch.ones_like(case.ratios)
    parameters = []
    for run, arrays, update in zip(case.runs, case.arrays, updates, strict=True):
        rule = case.rules[run.rule]
        ratio = _ratio(rule, *norms[run.layer].tolist()) if run.length else 1.0
        if run.length:
            ratios[run.layer] = ratio
        size = rule.lr * ratio
        if int(rule.flags) & CORRECT_STEP:
            size *= math.sqrt(1 - rule.beta2**rule.step) / (1 - rule.beta1**rule.step)
        parameters.append(arrays.parameter.double() - size * update)
    return Expected(parameters, norms, ratios, total)


def _ratio(rule: Rule, weight_square: float, update_square: float) -> float:
    if not int(rule.flags) & ADAPT or weight_square == 0 or update_square == 0:
        return 1.0
    weight = min(max(math.sqrt(weight_square), rule.min_weight_norm), rule.max_weight_norm)
    return min(max(weight / math.sqrt(update_square), rule.min_coeff), rule.max_coeff)


def step_and_compare(op: object, case: Case) -> None:
    """One step of the op, against float64 (the lines are those that the op promises; see each)."""
    before = [a.parameter.double() for a in case.arrays]
    expected = oracle(case)
    op.square_sum(case.tables, case.control)  # type: ignore[attr-defined]
    op.moments(case.tables, case.norms, case.control)  # type: ignore[attr-defined]
    op.apply(case.tables, case.norms, case.control, case.ratios)  # type: ignore[attr-defined]
    # Sums in fp64 of at most millions of terms.
    assert math.isclose(case.control[2].item(), expected.square_sum, rel_tol=1e-12)
    tolerance = _ratio_tolerance(case, expected)
    assert bool(((case.ratios - expected.ratios).abs() <= tolerance * expected.ratios).all())
    # A norm's square doubles the relative error that the ratio may have.
    assert bool(((case.norms - expected.norms).abs() <= 2 * tolerance[:, None] * expected.norms).all())
    for run, arrays, old, new in zip(case.runs, case.arrays, before, expected.parameters, strict=True):
        assert_step(arrays.parameter, old, new, run.parameter)
        if arrays.copy is not None:
            # Rounded once, from the value in fp32.
            assert_step(arrays.copy, old, new, arrays.copy.dtype)
            assert run.parameter != torch.float32 or torch.equal(arrays.copy, arrays.parameter.to(arrays.copy.dtype))
    assert case.guards_hold()


def _ratio_tolerance(case: Case, expected: Expected) -> Tensor:
    """1e-6, but more for layers so short that all their moments may happen to go through zero at once: an update, of size 1
    otherwise, is then as uncertain as before and much smaller."""
    elements = torch.zeros(case.tables.layers, dtype=torch.float64)
    for run in case.runs:
        elements[run.layer] += run.length
    mean = (expected.norms[:, 1].cpu() / elements.clamp(min=1)).sqrt()
    short = (elements < 31) & (mean > 0) & (mean < 1)
    return torch.where(short, 1e-6 / mean, 1e-6).to(case.device)


def assert_step(got: Tensor, old: Tensor, new: Tensor, dtype: torch.dtype) -> None:
    """The step's error beyond the rounding of the stored parameter is at most 2e-6 of the greatest step."""
    if not got.numel():
        return
    relative, absolute = ROUNDING[dtype]
    error = (got.double() - new).abs() - relative * torch.maximum(old.abs(), new.abs()) - absolute
    greatest = (new - old).abs().max().item()
    assert error.max().clamp(min=0).item() <= 2e-6 * greatest


def flagged(rule: Rule, flags: int) -> Rule:
    """The rule with these flags."""
    return rule._replace(flags=float(flags))


def shifted(run: Run, shifts: tuple[int, int, int, int, int]) -> Run:
    """The same run elsewhere in memory."""
    return replace(run, shifts=shifts)
