"""The CUDA op on a GPU: against float64 and the CPU op, and what only a device can show (graphs, launches, waiting, size)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from ds_terapipe.optim.op.cuda_op import CudaOp

from .op_tests import CudaTests
from .tables import ALIKE, APART, BF16, FP16, FP32, Case, Run, run, run_in_phases, same, step_and_compare

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
    """Layers of many chunks, of several segments, and of every type."""
    types = (FP32, FP16, BF16)
    runs = [Run(1_000_003, 0), Run(257, 0, shifts=APART), Run(70_000, 1, types=(FP32, FP32, BF16), shifts=ALIKE)]
    runs += [Run(5000 + i, 2 + i, types=(types[i % 3], types[i // 3], types[-i % 3])) for i in range(9)]
    return Case(runs, device="cuda")


def test_ten_thousand_tiny_layers(op: CudaOp) -> None:
    step_and_compare(op, Case([Run(1 + i % 7, i) for i in range(10_000)], device="cuda", fresh=True))


def test_same_bits_at_every_run(op: CudaOp) -> None:
    found = []
    for way in (run, run, run, run_in_phases):
        case = mixed()
        for _ in range(3):
            case.set_control(max_norm=1.0)
            way(op, case, advance=True)
        found.append(case.bits())
    assert all(same(found[0], other) for other in found)


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
