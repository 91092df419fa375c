"""The op on the CPU, on every instruction set, and the same in PyTorch, against float64 and against each other."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe.optim.op import jit
from ds_terapipe.optim.op.backends import CpuOp
from ds_terapipe.optim.op.builder import CpuLambBuilder
from ds_terapipe.optim.op.plain import Plain

from .op_tests import OpTests
from .oracle import Rule
from .tables import BF16, FP16, FP32, Case, Run, run, run_in_phases, same

SETS = ("scalar", "avx2", "avx512")


@pytest.fixture
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The op on the instruction set that is asked for, or the back end in PyTorch."""
    name = getattr(request, "param", None)
    if name == "plain":
        return Plain()
    monkeypatch.delenv("DS_TERAPIPE_LAMB_ISA", raising=False)
    made = CpuOp()
    if name is not None:
        if SETS.index(name) > SETS.index(made.instruction_set):
            pytest.skip(f"this processor has no {name}")
        monkeypatch.setenv("DS_TERAPIPE_LAMB_ISA", name)
    return made


@pytest.mark.parametrize("op", [*SETS, "plain"], indirect=True)
class TestOp(OpTests):
    """All instruction sets and PyTorch."""


def test_results_are_the_same_bits_however_they_are_computed(op: CpuOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of all types, the largest beyond what the op keeps in the cache and what it streams from."""
    runs = [Run(n, i, shifts=(i % 3,) * 5) for i, n in enumerate([1, 0, 257, 65537, 300_001, 2_800_000])]
    runs += [Run(70_001, 6, types=(BF16, FP16, FP32)), Run(150_001, 6, types=(FP32, BF16, BF16))]
    runs += [Run(40 + i, 7 + i) for i in range(100)]
    best = op.instruction_set
    ways = [(name, 1, run) for name in SETS[: SETS.index(best) + 1]]
    ways += [(best, 2, run), (best, 3, run), (best, 1, run_in_phases), (best, 2, run_in_phases)]
    found = []
    threads = torch.get_num_threads()
    for name, count, way in ways:
        monkeypatch.setenv("DS_TERAPIPE_LAMB_ISA", name)
        torch.set_num_threads(count)
        case = Case(runs)
        case.set_control(0.5, 0.01)
        start = case.bits()
        way(op, case)
        torch.set_num_threads(threads)
        assert not same(case.bits(), start)
        found.append(case.bits())
    assert [same(found[0], other) for other in found] == [True] * len(ways)


def test_norms_of_equal_numbers_have_no_drift(op: CpuOp) -> None:
    case = Case([Run(1_000_003)])
    case.arrays[0].parameter.fill_(0.1)
    run(op, case)
    # Every run of 256 squares errs alike: 16 additions in fp32, each by 6e-8 at most and half of that on average.
    assert case.norms[0, 0].item() == pytest.approx(1_000_003 * torch.tensor(0.1).double().item() ** 2, rel=5e-7)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("op", SETS, indirect=True)
def test_numbers_of_sixteen_bits_are_read_exactly_and_rounded_to_nearest_even(op: CpuOp, dtype: torch.dtype) -> None:
    """Every number of the type, its neighbours in fp32 and the points half way between them; and nan."""
    own = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    own = own[own.isfinite()]
    half = {FP16: 1 << 12, BF16: 1 << 15}[dtype]
    near = [(own.float().view(torch.int32) + i).view(FP32) for i in (0, 1, -1, half, half - 1, half + 1)]
    values = torch.cat([*near, torch.tensor([math.nan])])
    values = values[~values.isinf()]  # inf - 0 * inf is a nan
    # Without ADAPT: the ratio of a layer that has a nan in it is one.
    runs = [Run(len(values), 0, types=(FP32, FP32, dtype)), Run(len(own), 1, types=(dtype, dtype, FP32))]
    case = Case(runs, [Rule(lr=0.0, weight_decay=0.0, beta3=1.0, flags=0)], fresh=True)
    rounded, read = case.arrays
    rounded.parameter.copy_(values)
    rounded.gradient.zero_()
    read.parameter.copy_(own)
    read.gradient.copy_(own)
    run(op, case)
    # Zeros are compared without their sign: -0 - 0 * u has the sign of u.
    torch.testing.assert_close(rounded.copy, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(tensor, own.float()) for tensor in (read.copy, read.exp_avg))
    assert torch.equal(read.parameter, own)


# --------------------------------------------------------- under AddressSanitizer and UndefinedBehaviorSanitizer

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1", "-Wno-maybe-uninitialized"]


def execute(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The driver sanitize.cpp and the sources of the op, without those that need Python.

    A sanitizer that cannot see a write behind the end of an array is none.
    """
    folder, compiler = tmp_path_factory.mktemp("sanitize"), str(jit.compiler())
    wrong, made = folder / "wrong.cpp", str(folder / "wrong")
    wrong.write_text("int main(int n, char**) { char* a = new char[8]; a[7 + n] = 1; return a[0]; }\n")
    if jit.compiler() is None or execute(compiler, *FLAGS, str(wrong), "-o", made).returncode:
        pytest.skip("no C++ compiler, or it has no sanitizer runtime")
    done = execute(made)
    assert done.returncode != 0 and "wrong.cpp:1" in done.stderr
    builder = CpuLambBuilder()
    kept = [flag for flag in builder.cxx_args() if not flag.startswith(("-O", "-g"))]
    sources = [source for source in builder.sources() if not source.endswith("bindings.cpp")]
    sources += [str(Path(__file__).with_name("sanitize.cpp")), f"-I{jit.source_folder()}"]
    done = execute(compiler, *kept, *FLAGS, *sources, "-o", str(folder / "sanitize"))
    assert done.returncode == 0, done.stderr
    return str(folder / "sanitize")


@pytest.mark.parametrize("isa", SETS)
def test_no_access_outside_and_nothing_undefined(program: str, isa: str) -> None:
    # Threads that OpenMP keeps to the end are no leak; LeakSanitizer cannot run under a debugger or in some containers.
    # Its copies of stack frames are not aligned for AVX-512.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    done = execute(program, DS_TERAPIPE_LAMB_ISA=isa, OMP_NUM_THREADS="3", ASAN_OPTIONS=options)
    if "this processor has" in done.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [isa]
