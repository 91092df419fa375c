"""The CPU op against float64, and against itself: other instruction sets, numbers of threads, cuts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from ds_terapipe.optim.op.backends import CpuOp

from .tables import (
    ADAPT,
    CORRECT_MOMENTS,
    CORRECT_STEP,
    EPS_INSIDE_SQRT,
    Rule,
    Run,
    cloned,
    guarded,
    guards_hold,
    random_run,
    reference,
    tables_of,
)

SETS = ("scalar", "avx2", "avx512")
# Half the spacing of numbers, relative to them: what storing the right result may cost.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
STEP_TOLERANCE = 2e-6
RATIO_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def op() -> CpuOp:
    return CpuOp()


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest, op: CpuOp, monkeypatch: pytest.MonkeyPatch) -> str:
    return use(request.param, op, monkeypatch)


def use(name: str, op: CpuOp, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("DS_TERAPIPE_LAMB_ISA", raising=False)
    if SETS.index(name) > SETS.index(op.instruction_set):
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv("DS_TERAPIPE_LAMB_ISA", name)
    return name


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def control_of(grad_scale: float = 1.0, max_grad_norm: float = 0.0) -> torch.Tensor:
    return torch.tensor([grad_scale, max_grad_norm, 0.0, 0.0], dtype=torch.float64)


def run_step(op: CpuOp, runs: list[Run], rules: list[Rule], layers: int, control: torch.Tensor, phases: bool = False):
    """square_sum and step, or the two phases one by one; returns norms and ratios."""
    tables = tables_of(runs, rules, layers)
    norms = torch.full((layers, 2), math.nan, dtype=torch.float64)
    ratios = torch.full((layers,), math.nan, dtype=torch.float64)
    op.square_sum(tables, control)
    if phases:
        op.moments(tables, norms, control)
        op.apply(tables, norms, control, ratios)
    else:
        op.step(tables, norms, control, ratios)
    return norms, ratios


def assert_close(op: CpuOp, runs: list[Run], rules: list[Rule], layers: int, **settings: float) -> None:
    """One step against the reference, by the measure that the back ends are held to."""
    control = control_of(**settings)
    counted = [run.gradient.double().square().sum().item() for run in runs if run.counted]
    want = reference(runs, rules, layers, [*control[:2].tolist(), sum(counted), 0.0])
    before = cloned(runs)
    norms, ratios = run_step(op, runs, rules, layers, control)
    assert control[3] == 0
    torch.testing.assert_close(control[2].item(), sum(counted), rtol=1e-6, atol=0)
    # Sums of squares at twice the relative error of the ratios.
    torch.testing.assert_close(norms, want.norms, rtol=RATIO_TOLERANCE, atol=0)
    torch.testing.assert_close(ratios, want.ratios, rtol=RATIO_TOLERANCE, atol=0)
    for index, (run, old) in enumerate(zip(runs, before, strict=True)):
        assert all(guards_hold(tensor) for tensor in run.tensors())
        assert torch.equal(run.gradient, old.gradient)
        # A few roundings of each term; terms may cancel in m, hence the absolute part.
        torch.testing.assert_close(run.exp_avg.double(), want.exp_avg[index], rtol=3e-7, atol=3e-9)
        torch.testing.assert_close(run.exp_avg_sq.double(), want.exp_avg_sq[index], rtol=4e-7, atol=1e-15)
        assert_parameter(run, old, want.parameter[index], want.step[index])


def assert_parameter(run: Run, old: Run, want: torch.Tensor, step: torch.Tensor) -> None:
    if not want.numel():
        return
    sizes = torch.maximum(old.parameter.double().abs(), want.abs())
    for stored in [run.parameter] if run.copy is None else [run.parameter, run.copy]:
        # 2^-25 is half the spacing of fp16 numbers near zero.
        rounding = ROUNDING[stored.dtype] * sizes + (2.0**-25 if stored.dtype == torch.float16 else 0.0)
        excess = ((stored.double() - want).abs() - rounding).clamp(min=0).max()
        assert excess <= STEP_TOLERANCE * step.abs().max()


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_step_is_that_of_float64_for_every_length(op: CpuOp, isa: str, offset: int) -> None:
    lengths = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 255, 256, 257, 2047, 2048, 2049, 8191, 8193, 65535, 65536, 65537]
    runs = [random_run(n, seed, offset=offset, layer=seed) for seed, n in enumerate(lengths)]
    assert_close(op, runs, [Rule()], len(lengths))


@pytest.mark.parametrize("flags", range(16))
def test_step_is_that_of_float64_for_every_flag(op: CpuOp, flags: int) -> None:
    if flags & CORRECT_MOMENTS and flags & CORRECT_STEP:
        flags = flags & ~CORRECT_STEP  # no mode has both
    rules = [
        Rule(flags=flags),
        Rule(flags=flags, lr=0.003, beta1=0.5, beta2=0.0, beta3=1.0, eps=1e-3, weight_decay=0.0, step=1),
        Rule(flags=flags, min_coeff=0.01, max_coeff=0.3, beta2=0.99999, step=200),
        Rule(flags=flags, min_weight_norm=2.0, max_weight_norm=3.0, beta1=0.0, beta3=1.0),
    ]
    assert_close(op, [random_run(1000 + i, i, layer=i, rule=i) for i in range(4)], rules, 4)


@pytest.mark.parametrize("types", list(itertools.product(ROUNDING, ROUNDING, [None, *ROUNDING])))
def test_step_is_that_of_float64_for_every_mixture_of_types(op: CpuOp, isa: str, types) -> None:
    runs = [random_run(n, n, types=types, offset=1, layer=i) for i, n in enumerate([1, 33, 2500])]
    assert_close(op, runs, [Rule(lr=0.1)], 3)


def test_layers_of_many_segments_and_layers_without_any(op: CpuOp) -> None:
    layers = [1, 1, 1, 3, 3, 6]
    runs = [random_run(1 + 700 * i, i, layer=layer, offset=i) for i, layer in enumerate(layers)]
    assert_close(op, runs, [Rule()], 9)
    norms, ratios = run_step(op, runs, [Rule()], 9, control_of())
    for layer in (0, 2, 4, 5, 7, 8):
        assert norms[layer].tolist() == [0, 0] and ratios[layer] == 1


def test_gradients_are_unscaled_and_clipped_by_the_norm_of_the_counted_ones(op: CpuOp) -> None:
    runs = [random_run(5000, seed, layer=seed, counted=seed != 1) for seed in range(3)]
    assert_close(op, cloned(runs), [Rule()], 3, grad_scale=2.0**-7)
    assert_close(op, cloned(runs), [Rule()], 3, max_grad_norm=0.1)
    assert_close(op, cloned(runs), [Rule()], 3, grad_scale=3.0, max_grad_norm=0.1)
    assert_close(op, cloned(runs), [Rule()], 3, grad_scale=3.0, max_grad_norm=1e9)


def everything(runs: list[Run]) -> list[torch.Tensor]:
    """All memory of the segments as bits, to be compared by torch.equal: nan is nan."""
    return [
        tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
        for run in runs
        for tensor in run.tensors()
    ]


def same_bits(first: list[Run], second: list[Run]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(everything(first), everything(second), strict=True))


def mixed_model() -> list[Run]:
    """Small and large layers of all types; the largest is beyond what the op keeps in the cache and what it streams from."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    runs = [random_run(n, n, layer=i, offset=i % 3) for i, n in enumerate([1, 0, 257, 65537, 300_001, 2_800_000])]
    runs.append(random_run(70_001, 1, types=(bf16, fp16, fp32), layer=6))
    runs.append(random_run(150_001, 2, types=(fp32, bf16, bf16), layer=6))
    return runs + [random_run(40 + i, i, layer=7 + i) for i in range(100)]


def test_results_are_the_same_bits_however_they_are_computed(
    op: CpuOp, monkeypatch: pytest.MonkeyPatch, threads
) -> None:
    start = mixed_model()
    ways = [(name, 1, False) for name in SETS[: SETS.index(op.instruction_set) + 1]]
    best = op.instruction_set
    ways += [(best, 2, False), (best, 3, False), (best, 1, True), (best, 2, True)]
    first = None
    for name, count, phases in ways:
        monkeypatch.setenv("DS_TERAPIPE_LAMB_ISA", name)
        threads(count)
        runs, control = cloned(start), control_of(0.5, 0.01)
        norms, ratios = run_step(op, runs, [Rule()], 107, control, phases)
        if first is None:
            first = (runs, norms, ratios, control)
            assert not same_bits(runs, start)
            continue
        assert same_bits(runs, first[0]), (name, count, phases)
        assert torch.equal(norms, first[1]) and torch.equal(ratios, first[2]) and torch.equal(control, first[3])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2047, 2999])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_gradient_that_is_not_finite_stops_the_step(op: CpuOp, isa: str, value: float, place: int, dtype) -> None:
    types = (torch.float32, dtype, None)
    runs = [random_run(3000, seed, types=types, layer=seed, counted=seed == 0) for seed in range(2)]
    runs[1].gradient[place] = value
    before, control = cloned(runs), control_of(max_grad_norm=1.0)
    for phases in (False, True):
        norms, ratios = run_step(op, runs, [Rule()], 2, control, phases)
        assert control[3] == 1 and math.isfinite(control[2])
        assert same_bits(runs, before) and norms.isnan().all() and ratios.isnan().all()


def test_large_finite_gradients_are_finite(op: CpuOp, isa: str) -> None:
    run = random_run(3000, 0)
    run.gradient[::7] = 3e38
    run.gradient[1::7] = -1e30
    assert_close_sum(op, [run])
    norms, ratios = run_step(op, [run], [Rule()], 1, control_of())
    assert all(tensor.isfinite().all() for tensor in [*run.tensors(), norms, ratios])


def assert_close_sum(op: CpuOp, runs: list[Run]) -> None:
    control = control_of()
    op.square_sum(tables_of(runs, [Rule()], 1), control)
    want = sum(run.gradient.double().square().sum().item() for run in runs)
    assert control[3] == 0
    assert control[2].item() == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e-19, 1e19, 1e25, 1e36])
def test_norms_of_numbers_whose_squares_leave_fp32(op: CpuOp, isa: str, size: float) -> None:
    run = random_run(5000, 0, scale=size)
    rule = Rule(weight_decay=0.0)
    want = reference([run], [rule], 1, [1.0, 0.0, 0.0, 0.0])
    norms, ratios = run_step(op, [run], [rule], 1, control_of())
    torch.testing.assert_close(norms, want.norms, rtol=RATIO_TOLERANCE, atol=0)
    torch.testing.assert_close(ratios, want.ratios, rtol=RATIO_TOLERANCE, atol=0)


@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3, 7e-5])
def test_norms_of_equal_numbers_have_no_drift(op: CpuOp, value: float) -> None:
    run = random_run(1_000_003, 0)
    run.parameter.fill_(value)
    norms, _ = run_step(op, [run], [Rule()], 1, control_of())
    # Every run of 256 squares errs alike: 16 additions in fp32, each by 6e-8 at most and half of that on average.
    want = run.parameter.numel() * torch.tensor(value).double().item() ** 2
    assert norms[0, 0].item() == pytest.approx(want, rel=5e-7)


def test_nothing_moves_and_nothing_is_nan_where_everything_is_zero(op: CpuOp, isa: str) -> None:
    run = random_run(3000, 0)
    for tensor in run.tensors():
        tensor.zero_()
    norms, ratios = run_step(op, [run], [Rule(eps=0.0)], 1, control_of())
    assert norms.tolist() == [[0, 0]] and ratios.tolist() == [1]
    assert not any(tensor.any() for tensor in run.tensors())


def test_no_learning_rate_moves_the_moments_only(op: CpuOp) -> None:
    runs = [random_run(3000, 0)]
    before = cloned(runs)
    run_step(op, runs, [Rule(lr=0.0)], 1, control_of())
    assert torch.equal(runs[0].parameter, before[0].parameter)
    assert not torch.equal(runs[0].exp_avg, before[0].exp_avg)
    assert not torch.equal(runs[0].exp_avg_sq, before[0].exp_avg_sq)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Numbers that are hard to round to ``dtype``: every one of its own, their neighbours in fp32 and the points half way."""
    own = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    own = own[own.isfinite()]
    bits = own.view(torch.int32)
    half = {torch.float16: 1 << 12, torch.bfloat16: 1 << 15}[dtype]
    steps = [0, 1, -1, half, half - 1, half + 1]
    return torch.cat([(bits + step).view(torch.float32) for step in steps] + [torch.tensor([math.nan])])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_are_rounded_to_nearest_even(op: CpuOp, isa: str, dtype: torch.dtype) -> None:
    values = patterns(dtype)
    values = values[~values.isinf()]  # inf - 0 * inf is a nan
    zeros = torch.zeros(values.numel())
    run = Run(
        guarded(values, torch.float32, 0), zeros, zeros.clone(), zeros.clone(), torch.zeros(values.numel(), dtype=dtype)
    )
    # Without ADAPT: the ratio of a layer that has a nan in it is one.
    run_step(op, [run], [Rule(lr=0.0, weight_decay=0.0, flags=0)], 1, control_of())
    want = values.to(dtype)
    nan = want.isnan()
    assert torch.equal(run.copy.isnan(), nan)
    # Zeros are compared without their sign: -0 - 0 * u has the sign of u.
    assert torch.equal(run.copy[~nan], want[~nan])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_numbers_are_read_exactly(op: CpuOp, isa: str, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    zeros = torch.zeros(values.numel())
    run = Run(values.clone(), values.clone(), zeros, zeros.clone(), torch.ones(values.numel()))
    run_step(op, [run], [Rule(lr=0.0, weight_decay=0.0, beta3=1.0)], 1, control_of())
    assert torch.equal(run.copy, values.float())
    assert torch.equal(run.exp_avg, values.float())
    assert torch.equal(run.parameter, values)


def spoiled(column: int, value: int) -> list[list[int]]:
    rows = [random_run(10, 0).row(), random_run(10, 1).row()]
    rows[1][column] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (spoiled(0, 0), "null address"),
        (spoiled(3, 0), "null address"),
        (spoiled(5, -1), "length -1"),
        (spoiled(6, 5), "layer 5"),
        (spoiled(6, -1), "layer -1"),
        (spoiled(7, 1), "rule 1"),
        (spoiled(7, 3 << 16), "type 3"),
        (spoiled(7, 7 << 24), "type 7"),
        (spoiled(7, 1 << 40), "types"),
        (spoiled(7, -1), "rule 65535"),
    ],
)
def test_tables_that_make_no_sense_are_refused(op: CpuOp, rows: list[list[int]], message: str) -> None:
    tables = tables_of([], [Rule()], 3)
    tables.segments = torch.tensor(rows, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"segments\[1\].*{message}"):
        op.square_sum(tables, control_of())


@pytest.mark.parametrize(
    "rule", [Rule(beta1=1.0), Rule(beta2=-0.1), Rule(eps=-1.0), Rule(step=0.0), Rule(flags=16), Rule(lr=math.nan)]
)
def test_rules_that_make_no_sense_are_refused(op: CpuOp, rule: Rule) -> None:
    with pytest.raises(ValueError, match=r"rules\[1\]"):
        op.square_sum(tables_of([random_run(3, 0)], [Rule(), rule], 1), control_of())


def test_arrays_that_do_not_fit_are_refused(op: CpuOp) -> None:
    tables, control = tables_of([random_run(3, 0)], [Rule()], 2), control_of()
    good, ratios = torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for norms in (good[:1], good.float(), torch.zeros(2, 4, dtype=torch.float64)[:, ::2]):
        with pytest.raises(ValueError, match="norms"):
            op.step(tables, norms, control, ratios)
    with pytest.raises(ValueError, match="ratios"):
        op.step(tables, good, control, ratios[:1])
    with pytest.raises(ValueError, match="control"):
        op.step(tables, good, control[:3], ratios)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="grad_scale"):
            op.step(tables, good, control_of(scale), ratios)


def test_segments_out_of_order_are_refused(op: CpuOp) -> None:
    with pytest.raises(ValueError, match="ascending"):
        op.square_sum(tables_of([random_run(3, 0, layer=1), random_run(3, 1, layer=0)], [Rule()], 2), control_of())


def test_an_instruction_set_that_is_unknown_is_refused(op: CpuOp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_TERAPIPE_LAMB_ISA", "mmx")
    with pytest.raises(ValueError, match=r"mmx.*scalar, avx2 or avx512"):
        op.square_sum(tables_of([random_run(3, 0)], [Rule()], 1), control_of())


def test_no_segments_are_no_work(op: CpuOp) -> None:
    norms, ratios = run_step(op, [], [], 2, control_of())
    assert norms.tolist() == [[0, 0], [0, 0]] and ratios.tolist() == [1, 1]


def test_two_hundred_steps_in_a_row_stay_with_float64(op: CpuOp) -> None:
    random = np.random.default_rng(0)
    runs = [random_run(3000, 0)]
    m, v = runs[0].exp_avg.double(), runs[0].exp_avg_sq.double()
    for step in range(3, 203):
        runs[0].gradient.copy_(torch.from_numpy(random.standard_normal(3000) * 1e-2))
        g, rule, old = runs[0].gradient.double(), Rule(step=step), cloned(runs)[0]
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + (1 - 0.999) * g * g
        exact = Run(old.parameter, torch.zeros(3000), m / 0.9, v / 0.999)
        want = reference([exact], [rule], 1, [1.0, 0.0, 0.0, 0.0])
        run_step(op, runs, [rule], 1, control_of())
        assert_parameter(runs[0], old, want.parameter[0], want.step[0])


def test_flags_of_the_tests_are_those_of_the_package() -> None:
    from ds_terapipe.optim import modes

    ours = (ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT)
    assert ours == (modes.ADAPT, modes.CORRECT_MOMENTS, modes.CORRECT_STEP, modes.EPS_INSIDE_SQRT)
