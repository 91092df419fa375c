"""Tables for a back end made by hand, on any device, and one step of LAMB in float64 over them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_terapipe.optim.op.segments import Tables, View
from ds_terapipe.optim.op.step_tensors import TYPES

from .oracle import STEP_TOLERANCE, Rule, gradient_factor, step_error

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
GUARD, SENTINEL = 32, 7.5
ALIKE, APART = (1, 1, 1, 1, 1), (1, 0, 2, 3, 1)


class Run(NamedTuple):
    length: int
    layer: int = 0
    rule: int = 0
    types: tuple[torch.dtype, torch.dtype, torch.dtype | None] = (FP32, FP32, None)  # of parameter, gradient and copy
    # elements by which parameter, gradient, moments and copy start behind an address that a wide load could use
    shifts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    counted: bool = True
    scale: tuple[float, float] = (1.0, 1e-2)  # the size of the parameter, and of gradient and moments


class Case:
    """Tensors of some segments, with guards around them, and what a back end is given for them.

    Args:
        runs: sorted by layer.
        fresh: whether the moments are zero, as before a first step; else of the gradients' size.
    """

    def __init__(
        self, runs: Sequence[Run], rules: Sequence[Rule] = (Rule(),), layers: int = 0, device: str = "cpu", fresh: bool = False
    ) -> None:
        self.runs, self.rules = list(runs), list(rules)
        layers = layers or max((run.layer for run in runs), default=-1) + 1
        random = torch.Generator().manual_seed(0)
        self.arrays: list[View] = []
        self._buffers: list[tuple[Tensor, int, int]] = []
        for run in runs:
            tensors = [
                None if dtype is None else self._guarded(run.length, shift, dtype, device)
                for dtype, shift in zip((*run.types[:2], FP32, FP32, run.types[2]), run.shifts, strict=True)
            ]
            self.arrays.append(View(*tensors))
            sizes = (*run.scale, *((0.0, 0.0) if fresh else (run.scale[1], run.scale[1] ** 2)))
            for tensor, size in zip(tensors[:4], sizes, strict=True):
                tensor.copy_(size * torch.randn(run.length, generator=random))
            self.arrays[-1].exp_avg_sq.abs_()
        rows = []
        for view, run in zip(self.arrays, runs, strict=True):
            parameter, gradient, copy = (TYPES[dtype or FP32] for dtype in run.types)
            kind = run.rule | parameter << 16 | gradient << 20 | copy << 24 | run.counted << 28
            rows.append([*(0 if tensor is None else tensor.data_ptr() for tensor in view), run.length, run.layer, kind])
        values = torch.tensor(self.rules, dtype=torch.float64, device=device).reshape(-1, 12)
        self.tables = Tables(torch.tensor(rows, dtype=torch.int64).reshape(-1, 8), values, layers, views=self.arrays)
        self.norms, self.ratios, self.control = (
            torch.full(shape, 99.0, dtype=torch.float64, device=device) for shape in ((layers, 2), (layers,), (4,))
        )
        self.set_control()

    def _guarded(self, length: int, shift: int, dtype: torch.dtype, device: str) -> Tensor:
        # PyTorch's own addresses are multiples of 64 bytes, and so is the guard.
        buffer = torch.full((2 * GUARD + shift + length,), SENTINEL, dtype=dtype, device=device)
        self._buffers.append((buffer, GUARD + shift, length))
        return buffer[GUARD + shift : GUARD + shift + length]

    def guards_hold(self) -> bool:
        """Whether nothing was written beside the tensors."""
        around = [torch.cat([b[:start], b[start + length :]]) for b, start, length in self._buffers]
        return all(bool((guard == SENTINEL).all()) for guard in around)

    def bits(self) -> list[Tensor]:
        """Copies of all that a step may change, as bits: nan is nan."""
        kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensors = [t for view in self.arrays for t in view if t is not None]
        tensors += [self.norms, self.ratios, self.control, self.tables.rules]
        return [t.clone().view(kinds[t.element_size()]) for t in tensors]

    def set_control(self, scale: float = 1.0, max_norm: float = 0.0) -> None:
        """Set ``control`` as before a step."""
        self.control.copy_(torch.tensor([scale, max_norm, 0.0, 0.0], dtype=torch.float64))

    def next_step(self, number: int, scale: float = 1.0, max_norm: float = 0.0) -> None:
        """Number the next step and give it other gradients in the same memory."""
        self.rules = [rule._replace(step=float(number)) for rule in self.rules]
        self.tables.rules.copy_(torch.tensor(self.rules, dtype=torch.float64))
        self.set_control(scale, max_norm)
        random = torch.Generator().manual_seed(number)
        for run, view in zip(self.runs, self.arrays, strict=True):
            view.gradient.copy_(run.scale[1] * torch.randn(run.length, generator=random))


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two results of :meth:`Case.bits` are equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(op: Any, case: Case, **options: Any) -> None:
    """One step of the op."""
    op.square_sum(case.tables, case.control)
    op.step(case.tables, case.norms, case.control, case.ratios, **options)


def run_in_phases(op: Any, case: Case, **options: Any) -> None:
    """One step of the op as where layers are sharded."""
    op.square_sum(case.tables, case.control)
    op.moments(case.tables, case.norms, case.control)
    op.apply(case.tables, case.norms, case.control, case.ratios, **options)


class Expected(NamedTuple):
    """The results of a step, float64: parameters and moments by segment, norms and ratios by layer, the gradients' squares."""

    parameters: list[Tensor]
    moments: list[tuple[Tensor, Tensor]]
    norms: Tensor
    ratios: Tensor
    squares: float


def reference(case: Case) -> Expected:
    """One step in float64, from what is stored."""
    views, runs = case.arrays, case.runs
    squares = sum(v.gradient.double().square().sum().item() for v, r in zip(views, runs, strict=True) if r.counted)
    factor = gradient_factor(*case.control[:2].tolist(), squares)
    norms, ratios = torch.zeros_like(case.norms), torch.ones_like(case.ratios)
    made, updates, parameters = [], [], []
    for view, each in zip(views, runs, strict=True):
        rule, p = case.rules[each.rule], view.parameter.double()
        made.append(rule.moments(view.gradient.double() * factor, view.exp_avg.double(), view.exp_avg_sq.double()))
        updates.append(rule.update(p, *made[-1]))
        norms[each.layer] += torch.stack([p.square().sum(), updates[-1].square().sum()])
    for view, each, update in zip(views, runs, updates, strict=True):
        rule = case.rules[each.rule]
        if each.length:
            ratios[each.layer] = rule.ratio(*norms[each.layer].sqrt().tolist())
        parameters.append(view.parameter.double() - rule.size(ratios[each.layer]) * update)
    return Expected(parameters, made, norms, ratios, squares)


def step_and_compare(op: Any, case: Case) -> None:
    """One step of the op is that of float64: ratios to 1e-6, parameters to 2e-6 of the step beyond their rounding."""
    want, before = reference(case), [view.parameter.double() for view in case.arrays]
    gradients = [view.gradient.clone() for view in case.arrays]
    run(op, case)
    assert case.control[3] == 0 and case.guards_hold()
    # On CUDA and in PyTorch all sums are fp64; on the CPU squares are added in fp32 first.
    assert math.isclose(case.control[2].item(), want.squares, rel_tol=1e-6 if op.name == "cpu" else 1e-12)
    torch.testing.assert_close(case.ratios, want.ratios, rtol=1e-6, atol=0)
    if op.name != "plain" or case.ratios.ne(1).any():  # which adds up what ratios need, and nothing else
        torch.testing.assert_close(case.norms, want.norms, rtol=2e-6, atol=0)  # sums of squares
    for i, (view, each) in enumerate(zip(case.arrays, case.runs, strict=True)):
        assert torch.equal(view.gradient, gradients[i])
        # a few roundings of each term; terms may cancel, hence the absolute part
        m, v = want.moments[i]
        torch.testing.assert_close(view.exp_avg.double(), m, rtol=3e-7, atol=3e-7 * each.scale[1])
        torch.testing.assert_close(view.exp_avg_sq.double(), v, rtol=4e-7, atol=1e-11 * each.scale[1] ** 2)
        for stored in (view.parameter, view.copy):
            if stored is not None:
                assert step_error(before[i], stored, want.parameters[i]) <= STEP_TOLERANCE
