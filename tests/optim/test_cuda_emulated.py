"""The CUDA kernels without a GPU: their source, unchanged, run on the host by cuda_emulation, against float64."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ds_terapipe.optim.op.cuda_op import CudaOp, check_segments, chunks

from . import cuda_emulation
from .cuda_cases import (
    ADAPT,
    CORRECT_MOMENTS,
    CORRECT_STEP,
    EPS_INSIDE_SQRT,
    Case,
    Rule,
    Run,
    flagged,
    make,
    oracle,
    shifted,
    step_and_compare,
)

pytestmark = pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="no g++")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALIKE, APART = (1, 1, 1, 1, 1), (1, 0, 2, 3, 1)
MIXED = [
    Run(1000, 0),
    Run(257, 0, rule=0, shifts=APART),
    Run(33, 1, copy=BF16),
    Run(0, 2),
    Run(1, 3, parameter=FP16, gradient=BF16),
    Run(3000, 5, shifts=ALIKE, counted=False),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return cuda_emulation.module(tmp_path_factory.mktemp("emulated"), cuda_emulation.SMALL)


@pytest.fixture
def op(library: ModuleType) -> CudaOp:
    return CudaOp(library)


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Sets the order in which blocks and threads run."""

    def choose(seed: int, workers: int) -> None:
        monkeypatch.setenv("EMULATION_SEED", str(seed))
        monkeypatch.setenv("EMULATION_WORKERS", str(workers))

    return choose


def run(op: CudaOp, case: Case) -> None:
    op.square_sum(case.tables, case.control)
    op.step(case.tables, case.norms, case.control, case.ratios)


@pytest.mark.parametrize("parameter", [FP32, FP16, BF16])
@pytest.mark.parametrize("gradient", [FP32, FP16, BF16])
def test_types(op: CudaOp, parameter: torch.dtype, gradient: torch.dtype) -> None:
    runs = [
        Run(700, layer, parameter=parameter, gradient=gradient, copy=copy, shifts=shifts)
        for layer, (copy, shifts) in enumerate(itertools.product([None, FP32, FP16, BF16], [ALIKE, APART]))
    ]
    case = make(runs, [Rule()], len(runs))
    for number in (1, 2):
        case.set_step(number)
        case.set_control(scale=0.25)
        case.new_gradients(number)
        step_and_compare(op, case)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 65535, 65536, 65537])
def test_lengths_and_places(op: CudaOp, length: int) -> None:
    shifts = [(0, 0, 0, 0, 0), *((i, i, i, i, i) for i in (1, 2, 3)), APART] if length < 1000 else [ALIKE]
    runs = [shifted(Run(length, layer, copy=BF16), shift) for layer, shift in enumerate(shifts)]
    step_and_compare(op, make(runs, [Rule()], len(runs)))


@pytest.mark.parametrize(
    "flags",
    [
        0,
        ADAPT,
        ADAPT | CORRECT_MOMENTS,
        ADAPT | CORRECT_STEP,
        ADAPT | CORRECT_MOMENTS | EPS_INSIDE_SQRT,
        CORRECT_MOMENTS,
    ],
)
def test_flags_over_steps(op: CudaOp, flags: int) -> None:
    rule = flagged(Rule(), flags)
    other = rule._replace(beta1=0.8, beta3=1.0, eps=1e-3, weight_decay=0.0)
    case = make([Run(300, 0), Run(301, 1, rule=1)], [rule, other], 2)
    for number in range(1, 11):
        case.set_step(number)
        case.set_control(scale=1 / 128, max_norm=0.5)
        case.new_gradients(number)
        step_and_compare(op, case)


def test_two_hundred_steps(op: CudaOp) -> None:
    case = make([Run(150, 0), Run(40, 1, shifts=ALIKE)], [Rule(lr=1e-3)], 2)
    for number in range(1, 201):
        case.set_step(number)
        case.set_control()
        case.new_gradients(number)
        if number in (1, 2, 10, 200):
            step_and_compare(op, case)
        else:
            oracle(case)
            run(op, case)


@pytest.mark.parametrize(
    "limits", [{"max_coeff": 0.3}, {"min_coeff": 2.5}, {"max_weight_norm": 3.0}, {"min_weight_norm": 60.0}]
)
def test_clamps(op: CudaOp, limits: dict[str, float]) -> None:
    case = make([Run(500, 0)], [Rule(**limits)], 1)
    free = make([Run(500, 0)], [Rule()], 1)
    step_and_compare(op, case)
    step_and_compare(op, free)
    assert not math.isclose(case.ratios.item(), free.ratios.item(), rel_tol=0.1)


def test_layers_of_many_chunks_several_segments_and_none(op: CudaOp) -> None:
    case = make(MIXED, [Rule()], 8)
    step_and_compare(op, case)
    assert case.norms[[2, 4, 6, 7]].eq(0).all()
    assert case.ratios[[2, 4, 6, 7]].eq(1).all()


def test_uncounted_gradients_are_left_out_of_the_norm_but_searched(op: CudaOp) -> None:
    case = make([Run(40, 0), Run(40, 1, counted=False)], [Rule()], 2)
    case.set_control(max_norm=0.1)
    case.arrays[1].gradient.mul_(100)
    step_and_compare(op, case)
    case.set_control()
    case.arrays[1].gradient[17] = math.inf
    op.square_sum(case.tables, case.control)
    assert case.control[3] == 1


def test_square_sums_add_up_over_tables(op: CudaOp) -> None:
    one, two = make([Run(100, 0)], [Rule()], 1), make([Run(333, 0)], [Rule()], 1, seed=1)
    op.square_sum(one.tables, one.control)
    op.square_sum(two.tables, one.control)
    total = sum(case.arrays[0].gradient.double().square().sum().item() for case in (one, two))
    assert math.isclose(one.control[2].item(), total, rel_tol=1e-14)
    assert one.control[3] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("place", [0, 256, 2998])
def test_found_inf_leaves_everything_as_it_was(op: CudaOp, bad: float, dtype: torch.dtype, place: int) -> None:
    case = make([*MIXED[:2], Run(2999, 1, gradient=dtype, shifts=ALIKE)], [Rule()], 2)
    run(op, case)
    case.set_control()
    case.arrays[2].gradient[place] = bad
    op.square_sum(case.tables, case.control)
    assert case.control[3] == 1
    before = case.snapshot()
    op.step(case.tables, case.norms, case.control, case.ratios, advance=True)
    for old, new in zip(before, case.snapshot(), strict=True):
        assert torch.equal(old, new) or torch.equal(old.isnan(), new.isnan())
    # The counters are in order: the next step is like any other.
    case.arrays[2].gradient[place] = 1.0
    case.set_control()
    case.exact = [(a.exp_avg.double(), a.exp_avg_sq.double()) for a in case.arrays]
    case.set_step(2)
    step_and_compare(op, case)


def test_large_finite_values_are_no_overflow(op: CudaOp) -> None:
    runs = [Run(900, 0, scale=(1e25, 1e25)), Run(900, 1, gradient=BF16, scale=(1e-20, 1e30))]
    case = make(runs, [Rule()], 2)
    case.set_control(max_norm=1.0)
    step_and_compare(op, case)
    assert case.control[3] == 0


def test_unclipped_gradients_that_v_cannot_hold_leave_finite_values(op: CudaOp) -> None:
    case = make([Run(100, 0, scale=(1.0, 1e25))], [Rule()], 1)
    for number in (1, 2):
        case.set_step(number)
        case.set_control()
        run(op, case)
    arrays = case.arrays[0]
    assert all(bool(t.isfinite().all()) for t in (arrays.parameter, arrays.exp_avg, arrays.exp_avg_sq))


def test_zero_parameters_zero_updates_and_no_eps(op: CudaOp) -> None:
    rule = Rule(eps=0.0, weight_decay=0.0)
    case = make([Run(50, 0, scale=(0.0, 1.0)), Run(50, 1, scale=(1.0, 0.0))], [rule], 2)
    old = case.arrays[1].parameter.clone()
    run(op, case)
    assert case.ratios.tolist() == [1.0, 1.0]
    assert torch.equal(case.arrays[1].parameter, old)
    # The first step of Adam without eps is the learning rate.
    torch.testing.assert_close(case.arrays[0].parameter.abs(), torch.full((50,), 1e-2), rtol=1e-6, atol=0)


def test_no_segments(op: CudaOp) -> None:
    case = make([], [Rule()], 3)
    run(op, case)
    assert case.norms.eq(0).all() and case.ratios.eq(1).all() and case.control[2:].eq(0).all()
    run(op, make([], [Rule()], 0))


def test_two_thousand_tiny_layers(op: CudaOp) -> None:
    step_and_compare(op, make([Run(1 + i % 7, i) for i in range(2000)], [Rule()], 2000))


def test_same_bits_in_every_order(op: CudaOp, orders: object) -> None:
    results = []
    for seed, workers in ((0, 1), (1, 2), (2, 4)):
        orders(seed, workers)  # type: ignore[operator]
        case = make(MIXED, [Rule()], 8)
        for _ in range(2):
            case.set_control(max_norm=1.0)
            run(op, case)
        results.append(case.snapshot())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_same_moments_and_step_as_the_cpu_op_bit_for_bit(op: CudaOp) -> None:
    backends = pytest.importorskip("ds_terapipe.optim.op.backends")
    runs = [
        Run(3000, 0, copy=BF16),
        Run(777, 1, parameter=BF16, gradient=FP16, copy=FP16, shifts=APART),
        Run(65, 2, parameter=FP16, gradient=BF16),
    ]
    # Not adapted, because the two sum in different orders, which the ratio shows in its last digits.
    cases = [make(runs, [flagged(Rule(), CORRECT_MOMENTS)], 3) for _ in range(2)]
    for number in range(1, 6):
        for case, backend in zip(cases, (op, backends.CpuOp()), strict=True):
            case.set_step(number)
            case.set_control(scale=0.3)
            case.new_gradients(number)
            run(backend, case)
    for mine, other in zip(cases[0].arrays, cases[1].arrays, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert a is b or torch.equal(a, b)
    # fp32 sums of a few, then fp64, on the CPU.
    torch.testing.assert_close(cases[0].norms, cases[1].norms, rtol=1e-6, atol=0)


def test_advance_counts_and_new_settings_keep_the_count(op: CudaOp) -> None:
    case = make([Run(20, 0), Run(20, 1, rule=1)], [Rule(), Rule(step=5.0)], 2)
    for _ in range(3):
        case.set_control()
        op.square_sum(case.tables, case.control)
        op.step(case.tables, case.norms, case.control, case.ratios, advance=True)
    assert case.tables.rules[:, 6].tolist() == [4.0, 8.0]
    values = torch.arange(24, dtype=torch.float64).reshape(2, 12)
    op.write_rules(case.tables.rules, values)
    values[:, 6] = torch.tensor([4.0, 8.0])
    assert torch.equal(case.tables.rules, values)


def test_tables_may_move_between_steps(op: CudaOp) -> None:
    first, second = make([Run(600, 0)], [Rule()], 1), make([Run(600, 0)], [Rule()], 1, seed=3)
    run(op, first)
    other = make([Run(600, 0)], [Rule()], 1)
    first.tables.segments.copy_(second.tables.segments)
    first.tables.rules = second.tables.rules
    first.set_control()
    run(op, first)
    assert torch.equal(other.arrays[0].exp_avg, torch.zeros(600))
    assert second.arrays[0].exp_avg.abs().max() > 0


def test_chunks() -> None:
    segments = torch.zeros(4, 8, dtype=torch.int64)
    segments[:, 5] = torch.tensor([5, 0, 2**40 + 3, 8])
    segments[:, 6] = torch.tensor([0, 1, 1, 3])
    cut, first = chunks(segments, 5, 2**38)
    assert first.tolist() == [0, 1, 6, 6, 7, 7]
    assert (cut[:, 1] & 0xFFFFFFFF).tolist() == [0, 2, 2, 2, 2, 2, 3]
    assert cut[:, 0].tolist() == [0, *(i * 2**38 for i in range(5)), 0]
    cut, _ = chunks(segments[[0, 3]], 5, 4)
    assert (cut[:, 1] >> 32).tolist() == [4, 1, 4, 4]


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        (5, -1, "negative length"),
        (6, 9, "a layer that"),
        (7, 1, "a rule that"),
        (7, 3 << 16, "type"),
        (0, 0, "address"),
    ],
)
def test_wrong_tables_are_refused(op: CudaOp, column: int, value: int, what: str) -> None:
    case = make([Run(5, 0), Run(5, 1)], [Rule()], 2)
    case.tables.segments[1, column] = value
    with pytest.raises(ValueError, match=f"{what}.* row 1"):
        check_segments(case.tables)
    with pytest.raises(ValueError, match="row 1"):
        op.square_sum(case.tables, case.control)


def test_wrong_arrays_are_refused(op: CudaOp) -> None:
    case = make([Run(5, 0)], [Rule()], 1)
    with pytest.raises(ValueError, match=r"norms: got torch\.float32"):
        op.moments(case.tables, case.norms.float(), case.control)
    with pytest.raises(ValueError, match=r"control: .* with 4 elements"):
        op.square_sum(case.tables, case.control[:3])


def barriers() -> list[tuple[int, str]]:
    """Every barrier and fence in the kernels: line, and the source without it."""
    source = (cuda_emulation.SOURCES / "lamb_cuda.cu").read_text()
    found = re.finditer(r"__(syncthreads|threadfence)\(\);", source)
    return [(source[: m.start()].count("\n") + 1, source[: m.start()] + ";" + source[m.end() :]) for m in found]


def test_no_races(tmp_path: Path) -> None:
    program = cuda_emulation.races(tmp_path)
    runs = [cuda_emulation.run_races(program, seed) for seed in (1, 2)]
    assert [done.returncode for done in runs] == [0, 0], runs[0].stderr[:3000]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=[] if i == 1 else [pytest.mark.full]) for i in range(len(barriers()))]
)
def test_no_barrier_and_no_fence_is_there_for_nothing(tmp_path: Path, index: int) -> None:
    line, without = barriers()[index]
    done = cuda_emulation.run_races(cuda_emulation.races(tmp_path, without), seed=1)
    assert done.returncode != 0, f"nothing noticed that line {line} was missing"
