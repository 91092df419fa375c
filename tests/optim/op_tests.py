"""Tests that every back end must pass; a module that has a class of them has a fixture ``op`` for it."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ds_terapipe.optim.modes import ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT
from ds_terapipe.optim.op.backends import CpuOp

from .oracle import Rule
from .tables import ALIKE, APART, BF16, FP16, FP32, Case, Run, reference, run, run_in_phases, same, step_and_compare

LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 255, 256, 257, 2047, 2048, 2049)
LONG = (8191, 8193, 65535, 65536, 65537)
MIXTURES = list(itertools.product((FP32, FP16, BF16), (FP32, FP16, BF16), (None, FP32, FP16, BF16)))
MIXED = [
    Run(1000, 0), Run(257, 0, shifts=APART), Run(33, 1, types=(FP32, FP32, BF16)), Run(0, 2),
    Run(1, 3, types=(FP16, BF16, None)), Run(3000, 5, shifts=ALIKE, counted=False),
]  # fmt: skip


LARGE = [*MIXED, Run(1_000_003, 6), Run(70_000, 6, types=(FP32, FP32, BF16), shifts=ALIKE)]


class OpTests:
    """Steps of an op against float64, and what it must leave alone."""

    device = "cpu"
    long_everywhere = True
    """Whether the op is fast enough for long segments at every place."""

    def case(self, runs: Sequence[Run], rules: Sequence[Rule] = (Rule(),), **options: Any) -> Case:
        return Case(runs, rules, device=self.device, **options)

    @pytest.mark.parametrize("shifts", [(0,) * 5, ALIKE, (2,) * 5, (3,) * 5, APART], ids=str)
    def test_lengths_and_places(self, op: Any, shifts: tuple[int, ...]) -> None:
        lengths = LENGTHS + (LONG if self.long_everywhere or shifts == ALIKE else ())
        types = (FP32, FP32, BF16 if shifts == APART else None)
        step_and_compare(op, self.case([Run(n, i, types=types, shifts=shifts) for i, n in enumerate(lengths)]))

    @pytest.mark.parametrize("length", [1, 33, 700])
    def test_every_mixture_of_types(self, op: Any, length: int) -> None:
        runs = [Run(length, i, types=each, shifts=(ALIKE, APART)[i % 2]) for i, each in enumerate(MIXTURES)]
        step_and_compare(op, self.case(runs, [Rule(lr=0.1)]))

    @pytest.mark.parametrize("eps_inside", [0, EPS_INSIDE_SQRT])
    @pytest.mark.parametrize("correct", [0, CORRECT_MOMENTS, CORRECT_STEP])
    @pytest.mark.parametrize("adapt", [0, ADAPT])
    def test_every_flag_with_every_setting(self, op: Any, adapt: int, correct: int, eps_inside: int) -> None:
        rules = [
            Rule(), Rule(lr=0.003, beta1=0.5, beta2=0.0, beta3=1.0, eps=1e-3, weight_decay=0.0, step=1),
            Rule(min_coeff=1e-4, max_coeff=5e-3, beta2=0.99999, step=200),
            Rule(min_weight_norm=2.0, max_weight_norm=3.0, beta1=0.0, beta3=1.0), Rule(min_coeff=50.0),
            Rule(min_weight_norm=600.0),
        ]  # fmt: skip
        rules = [rule._replace(flags=float(adapt | correct | eps_inside)) for rule in rules]
        case = self.case([Run(400 + i, i, rule=i) for i in range(len(rules))], rules)
        step_and_compare(op, case)
        if adapt:
            assert case.ratios[[2, 4]].tolist() == [5e-3, 50.0], case.ratios.tolist()

    def test_layers_of_several_segments_and_of_none(self, op: Any) -> None:
        case = self.case(MIXED, layers=8)
        step_and_compare(op, case)
        for layer in (2, 4, 6, 7):
            assert case.norms[layer].tolist() == [0, 0] and case.ratios[layer] == 1

    def test_many_tiny_layers(self, op: Any) -> None:
        step_and_compare(op, self.case([Run(1 + i % 7, i) for i in range(2000)], fresh=True))

    @pytest.mark.parametrize("scale", [2.0**-7, 1.0, 3.0])
    @pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e9])
    def test_unscaled_and_clipped_by_the_counted_gradients(self, op: Any, scale: float, max_norm: float) -> None:
        case = self.case([Run(5000, i, counted=i != 1) for i in range(3)])
        case.arrays[1].gradient.mul_(100)
        case.set_control(scale, max_norm)
        step_and_compare(op, case)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
    @pytest.mark.parametrize("place", [0, 256, 2998])
    def test_a_bad_gradient_leaves_all_as_it_was(self, op: Any, bad: float, dtype: torch.dtype, place: int) -> None:
        """Also one that does not count in the norm; the next step is like any other."""
        for way in (run, run_in_phases):
            case = self.case([*MIXED[:2], Run(2999, 1, types=(FP32, dtype, None), shifts=ALIKE, counted=False)])
            case.set_control(max_norm=1.0)
            case.arrays[2].gradient[place] = bad
            before = case.bits()
            way(op, case, **({"advance": True} if op.name == "cuda" else {}))
            assert case.control[3] == 1 and math.isfinite(case.control[2])
            case.control[2:] = 0
            assert same(before, case.bits())
            case.next_step(4)
            step_and_compare(op, case)

    @pytest.mark.parametrize("sizes", [*((size, 1e-2) for size in (1e-40, 1e-25, 1e-19, 1e19, 1e25, 1e36)), (1.0, 1e20)], ids=str)
    def test_norms_of_numbers_whose_squares_leave_fp32(self, op: Any, sizes: tuple[float, float]) -> None:
        case = self.case([Run(5000, scale=sizes)], [Rule(weight_decay=0.0)], fresh=sizes[1] > 1)
        want = reference(case)
        run(op, case)
        torch.testing.assert_close(case.norms, want.norms, rtol=2e-6, atol=0)
        torch.testing.assert_close(case.ratios, want.ratios, rtol=1e-6, atol=0)

    def test_zero_weights_zero_updates_and_no_learning_rate(self, op: Any) -> None:
        rules = [Rule(eps=0.0, weight_decay=0.0, step=1.0), Rule(lr=0.0)]
        runs = [Run(50, 0, scale=(0, 1)), Run(50, 1, scale=(1, 0)), Run(50, 2, scale=(0, 0)), Run(50, 3, rule=1)]
        case = self.case(runs, rules, fresh=True)
        zero, still, nothing, unmoved = case.arrays
        old = [view.parameter.clone() for view in case.arrays]
        run(op, case)
        assert case.ratios[:3].tolist() == [1.0, 1.0, 1.0]
        assert torch.equal(still.parameter, old[1]) and torch.equal(unmoved.parameter, old[3])
        assert not any(tensor.any() for tensor in nothing[:4])
        assert unmoved.exp_avg.all() and unmoved.exp_avg_sq.all()
        # The first step of Adam without eps is the learning rate.
        assert zero.parameter.abs().tolist() == pytest.approx([0.01] * 50, rel=1e-6)


class CudaTests(OpTests):
    """Besides, for kernels that count steps themselves."""

    def test_same_bits_at_every_run(self, op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of which the emulation takes blocks and threads in other orders, and a device as they come."""
        found, runs = [], LARGE if self.long_everywhere else MIXED
        for number, way in enumerate((run, run, run_in_phases), start=1):
            monkeypatch.setenv("EMULATION_SEED", str(number))
            monkeypatch.setenv("EMULATION_WORKERS", str(number))
            case = self.case(runs, layers=8)
            for _ in range(3):
                case.set_control(max_norm=1.0)
                way(op, case, advance=True)
            found.append(case.bits())
        assert all(same(found[0], other) for other in found)

    def test_same_moments_and_step_as_the_cpu_op_bit_for_bit(self, op: Any) -> None:
        runs = [Run(3000, 0, types=(FP32, FP32, BF16)), Run(777, 1, types=(BF16, FP16, FP16), shifts=APART)]
        runs.append(Run(65, 2, types=(FP16, BF16, None)))
        # Not adapted, because the two sum in different orders, which the ratio shows in its last digits.
        mine, other = (Case(runs, [Rule(flags=CORRECT_MOMENTS)], device=device) for device in (self.device, "cpu"))
        for number in range(1, 6):
            for case, each in ((mine, op), (other, CpuOp())):
                case.next_step(number, scale=0.3)
                run(each, case)
        for ours, theirs in zip(mine.arrays, other.arrays, strict=True):
            assert all(a is b or torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
        # fp32 sums of a few, then fp64, on the CPU.
        torch.testing.assert_close(mine.norms.cpu(), other.norms, rtol=1e-6, atol=0)

    def test_advance_counts_and_new_settings_keep_the_count(self, op: Any) -> None:
        case = self.case([Run(20, 0), Run(20, 1, rule=1)], [Rule(step=1.0), Rule(step=5.0)])
        for _ in range(3):
            case.set_control()
            run(op, case, advance=True)
        assert case.tables.rules[:, 6].tolist() == [4.0, 8.0]
        values = torch.arange(24, dtype=torch.float64).reshape(2, 12)
        op.write_rules(case.tables.rules, values)
        values[:, 6] = torch.tensor([4.0, 8.0])
        assert torch.equal(case.tables.rules.cpu(), values)
