"""The CUDA op on a GPU: against float64 and the CPU op, and what only a device can show (graphs, launches, waiting, size)."""

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from ds_terapipe.optim.op.cuda_op import CudaOp

from .op_tests import LARGE, CudaTests
from .oracle import Rule
from .tables import BF16, Case, Run, run, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def op() -> CudaOp:
    return CudaOp()


class TestOnAGpu(CudaTests):
    """The kernels as they are compiled for the device."""

    device = "cuda"


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Every call that makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def mixed() -> Case:
    """Layers of many chunks, of several segments, and of none."""
    return Case(LARGE, layers=8, device="cuda")


def small() -> Case:
    return Case([Run(1000)], device="cuda")


def test_no_waiting_and_three_launches(op: CudaOp) -> None:
    case = mixed()
    settings = torch.tensor(case.rules, dtype=torch.float64)
    other = mixed()
    with no_waiting():  # the first step sends the tables, and so does one of tensors that have moved
        run(op, other)
        run(op, case)
        other.tables.segments.copy_(case.tables.segments)
        run(op, other)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with no_waiting():
            op.write_rules(case.tables.rules, settings)
            run(op, case, advance=True)
        torch.cuda.synchronize()
    device = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in device if not name.lower().startswith(("memcpy", "memset"))]
    assert len(kernels) == 3 and all("lamb" in name for name in kernels)


def test_graph_replays_the_step_and_counts(op: CudaOp) -> None:
    eager, captured = mixed(), mixed()
    for case in (eager, captured):  # one step outside, as a capture needs
        run(op, case, advance=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.control[2:].zero_()
        run(op, captured, advance=True)
    for number in range(3):
        for case in (eager, captured):
            case.arrays[0].gradient.mul_(0.5)
            case.tables.rules[:, 0] = 0.01 / (number + 1)
            if number == 1:
                case.arrays[0].gradient[5] = math.inf
            elif number == 2:
                case.arrays[0].gradient[5] = 1.0
        eager.control[2:].zero_()
        run(op, eager, advance=True)
        graph.replay()
    assert captured.tables.rules[0, 6] == 3.0 + 3  # a skipped step is not counted
    assert same(eager.bits(), captured.bits())


def test_capture_of_tensors_that_have_moved(op: CudaOp) -> None:
    first, second, expected = small(), small(), small()
    before = second.arrays[0].exp_avg.clone()
    run(op, first)
    run(op, expected)
    torch.cuda.synchronize()
    first.tables.segments.copy_(second.tables.segments)
    first.set_control()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(op, first)
    assert torch.equal(second.arrays[0].exp_avg, before)
    graph.replay()
    assert torch.equal(second.arrays[0].parameter, expected.arrays[0].parameter)


def test_capture_before_any_step_is_refused(op: CudaOp) -> None:
    case = small()
    with pytest.raises(RuntimeError, match="run a step outside"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(op, case)
    torch.cuda.synchronize()


def test_more_than_two_to_the_31_elements(op: CudaOp) -> None:
    length = 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 16 * length:
        pytest.skip("needs 34 GB of device memory")
    case = Case([Run(1)], [Rule(step=1.0)], device="cuda")
    parameter, gradient = (torch.full((length,), x, dtype=BF16, device="cuda") for x in (1.0, 0.5))
    exp_avg, exp_avg_sq = (torch.zeros(length, device="cuda") for _ in range(2))
    addresses = [tensor.data_ptr() for tensor in (parameter, gradient, exp_avg, exp_avg_sq)]
    case.tables.segments[0, :4] = torch.tensor(addresses)
    case.tables.segments[0, 5] = length
    case.tables.segments[0, 7] |= 2 << 16 | 2 << 20
    gradient[-1] = -0.5
    run(op, case)
    assert case.control[2].item() == 0.25 * length and case.norms[0, 0].item() == length
    # All elements are alike but the last, whose gradient has the other sign.
    assert exp_avg[:-1].min() == exp_avg[:-1].max() == -exp_avg[-1]
    assert parameter[:-1].min() == parameter[:-1].max() and parameter[0] < 1 < parameter[-1]
