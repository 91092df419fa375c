"""The CUDA op on a GPU: against float64 and the CPU op, and what only a device can show (graphs, launches, waiting, size)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from ds_terapipe.optim.op.cuda_op import CudaOp

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
    step_and_compare,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
ALIKE, APART = (1, 1, 1, 1, 1), (1, 0, 2, 3, 1)
SHAPES = (0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 65535, 65536, 65537)


@pytest.fixture(scope="module")
def op() -> CudaOp:
    return CudaOp()


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Every call that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mixed(device: str = "cuda") -> Case:
    """Layers of many chunks, of several segments, of none, and of every type."""
    types = (FP32, FP16, BF16)
    runs = [Run(1_000_003, 0), Run(257, 0, shifts=APART), Run(70_000, 1, shifts=ALIKE, copy=BF16)]
    runs += [Run(5000 + i, 2 + i, parameter=types[i % 3], gradient=types[i // 3], copy=types[-i % 3]) for i in range(9)]
    return make(runs, [Rule()], 12, device)


def run(op: CudaOp, case: Case, *, advance: bool = False) -> None:
    op.square_sum(case.tables, case.control)
    op.step(case.tables, case.norms, case.control, case.ratios, advance=advance)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_length_place_and_type_over_steps(op: CudaOp) -> None:
    types = (FP32, FP16, BF16)
    runs = [
        Run(length, layer := 3 * i + j, parameter=types[layer % 3], gradient=types[i % 3], copy=types[j], shifts=shifts)
        for i, length in enumerate(SHAPES)
        for j, shifts in enumerate([(0, 0, 0, 0, 0), ALIKE, APART])
    ]
    case = make(runs, [Rule()], len(runs), "cuda")
    # Not more: a layer of one element whose moment goes through zero has no digits left to compare.
    for number in (1, 2):
        case.set_step(number)
        case.set_control(scale=1 / 64, max_norm=1.0)
        case.new_gradients(number)
        step_and_compare(op, case)


@pytest.mark.parametrize("flags", [0, ADAPT | CORRECT_STEP, ADAPT | CORRECT_MOMENTS | EPS_INSIDE_SQRT])
def test_flags(op: CudaOp, flags: int) -> None:
    case = make([Run(3000, 0)], [flagged(Rule(max_coeff=10.0, min_coeff=0.01), flags)], 1, "cuda")
    for number in (1, 2, 10, 200):
        case.set_step(number)
        case.set_control()
        # Before these steps there were none: the moments' age is not what is tried here.
        step_and_compare(op, case)


def test_ten_thousand_tiny_layers(op: CudaOp) -> None:
    step_and_compare(op, make([Run(1 + i % 7, i) for i in range(10_000)], [Rule()], 10_000, "cuda"))


def test_same_bits_at_every_run(op: CudaOp) -> None:
    results = []
    for _ in range(5):
        case = mixed()
        for _ in range(3):
            case.set_control(max_norm=1.0)
            run(op, case, advance=True)
        results.append(case.snapshot())
    assert all(same(results[0], other) for other in results[1:])


def test_large_finite_values_are_no_overflow(op: CudaOp) -> None:
    case = make([Run(90_000, 0, scale=(1e25, 1e25))], [Rule()], 1, "cuda")
    case.set_control(max_norm=1.0)
    step_and_compare(op, case)
    assert case.control[3] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_found_inf_leaves_everything_as_it_was(op: CudaOp, bad: float) -> None:
    case = mixed()
    run(op, case, advance=True)
    case.set_control()
    case.arrays[-1].gradient[-1] = bad
    op.square_sum(case.tables, case.control)
    assert case.control[3] == 1
    case.control[2] = 0.0
    before = case.snapshot()
    op.step(case.tables, case.norms, case.control, case.ratios, advance=True)
    differs = [not torch.equal(a, b) for a, b in zip(before, case.snapshot(), strict=True)]
    # The gradient itself holds a nan in one of the cases, which equals nothing.
    assert sum(differs) <= int(math.isnan(bad))


def test_agrees_with_the_cpu_op(op: CudaOp) -> None:
    from ds_terapipe.optim.op.backends import CpuOp

    cpu = CpuOp()
    runs = [Run(100_001, 0, copy=BF16), Run(777, 1, parameter=BF16, gradient=FP16, shifts=APART)]
    cases = [make(runs, [flagged(Rule(), CORRECT_MOMENTS)], 2, device) for device in ("cuda", "cpu")]
    for number in range(1, 4):
        for case in cases:
            case.set_step(number)
            case.set_control(scale=0.3)
            case.new_gradients(number)
        run(op, cases[0])
        cpu.square_sum(cases[1].tables, cases[1].control)
        cpu.step(cases[1].tables, cases[1].norms, cases[1].control, cases[1].ratios)
    # Both round operation by operation in the same order; without adaptation no sum's order matters.
    for mine, other in zip(cases[0].arrays, cases[1].arrays, strict=True):
        assert all(a is None or torch.equal(a.cpu(), b) for a, b in zip(mine, other, strict=True))
    torch.testing.assert_close(cases[0].norms.cpu(), cases[1].norms, rtol=1e-6, atol=0)


def test_no_waiting_and_three_launches(op: CudaOp) -> None:
    case = mixed()
    settings = torch.tensor(case.rules, dtype=torch.float64)
    # The first step sends the tables.
    with no_waiting():
        run(op, case)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with no_waiting():
            op.write_rules(case.tables.rules, settings)
            run(op, case, advance=True)
        torch.cuda.synchronize()
    device = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in device if not name.lower().startswith(("memcpy", "memset"))]
    assert len(kernels) == 3
    assert all("lamb" in name for name in kernels)


def test_tensors_that_move_are_no_reason_to_wait(op: CudaOp) -> None:
    first, second = make([Run(1000, 0)], [Rule()], 1, "cuda"), make([Run(1000, 0)], [Rule()], 1, "cuda", seed=1)
    run(op, first)
    first.tables.segments.copy_(second.tables.segments)
    with no_waiting():
        run(op, first)
    assert second.arrays[0].exp_avg.abs().max() > 0


def test_graph_replays_the_step_and_counts(op: CudaOp) -> None:
    eager, captured = mixed(), mixed()
    # One step outside, as a capture needs.
    for case in (eager, captured):
        run(op, case, advance=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.control[2:].zero_()
        run(op, captured, advance=True)
    for number in range(3):
        for case in (eager, captured):
            case.new_gradients(number)
            case.tables.rules[:, 0] = 0.01 / (number + 1)
        if number == 1:
            for case in (eager, captured):
                case.arrays[0].gradient[5] = math.inf
        eager.control[2:].zero_()
        run(op, eager, advance=True)
        graph.replay()
    assert captured.tables.rules[0, 6] == 4.0
    assert same(eager.snapshot(), captured.snapshot())


def test_capture_of_tensors_that_have_moved(op: CudaOp) -> None:
    first, second = make([Run(600, 0)], [Rule()], 1, "cuda"), make([Run(600, 0)], [Rule()], 1, "cuda", seed=1)
    expected = make([Run(600, 0)], [Rule()], 1, "cuda", seed=1)
    run(op, first)
    run(op, expected)
    torch.cuda.synchronize()
    first.tables.segments.copy_(second.tables.segments)
    first.set_control()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(op, first)
    assert torch.equal(second.arrays[0].exp_avg, torch.zeros(600, device="cuda"))
    graph.replay()
    assert torch.equal(second.arrays[0].parameter, expected.arrays[0].parameter)


def test_capture_before_any_step_is_refused(op: CudaOp) -> None:
    case = make([Run(600, 0)], [Rule()], 1, "cuda")
    with pytest.raises(RuntimeError, match="run a step outside"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(op, case)
    torch.cuda.synchronize()


def test_on_a_side_stream(op: CudaOp) -> None:
    case, other = mixed(), mixed()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(op, case)
    torch.cuda.current_stream().wait_stream(stream)
    run(op, other)
    assert same(case.snapshot(), other.snapshot())


def test_more_than_two_to_the_31_elements(op: CudaOp) -> None:
    length = 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 16 * length:
        pytest.skip("needs 34 GB of device memory")
    case = make([Run(1, 0)], [Rule()], 1, "cuda")
    parameter, gradient = (torch.full((length,), x, dtype=BF16, device="cuda") for x in (1.0, 0.5))
    exp_avg, exp_avg_sq = (torch.zeros(length, device="cuda") for _ in range(2))
    addresses = [tensor.data_ptr() for tensor in (parameter, gradient, exp_avg, exp_avg_sq)]
    case.tables.segments[0, :4] = torch.tensor(addresses)
    case.tables.segments[0, 5] = length
    case.tables.segments[0, 7] |= 2 << 16 | 2 << 20
    gradient[-1] = -0.5
    run(op, case)
    assert case.control[2].item() == 0.25 * length
    assert case.norms[0, 0].item() == length
    # All elements are alike but the last, whose gradient has the other sign.
    assert exp_avg[:-1].min() == exp_avg[:-1].max() == -exp_avg[-1]
    assert parameter[:-1].min() == parameter[:-1].max()
    assert parameter[0] < 1 < parameter[-1]
