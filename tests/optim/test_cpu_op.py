"""The op on the CPU, on every instruction set, and the same in PyTorch, against float64 and against each other."""

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_terapipe import jit
from ds_terapipe.optim.op.backends import CpuOp
from ds_terapipe.optim.op.builder import CpuLambBuilder
from ds_terapipe.optim.op.plain import Plain

from . import tables
from .op_tests import LENGTHS, MIXTURES, OpTests
from .sanitizers import run_under
from .tables import ALIKE, BF16, FP16, FP32, Case, Run, run, run_in_phases, same

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
        if SETS.index(name) > SETS.index(made._op.instruction_set()):
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
    best = op._op.instruction_set()
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


SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1", "-Wno-maybe-uninitialized")


def watched_steps() -> None:
    """Odd lengths and places, all types, and layers that take streaming stores; behind the tensors the sanitizer watches."""
    recipe, tables.GUARD = jit.cpu_recipe(), 0
    flags = [flag for flag in recipe.cxx_args if not flag.startswith(("-O", "-g"))]
    made = replace(recipe, cxx_args=(*flags, *SANITIZED), ldflags=(*recipe.ldflags, *SANITIZED[:1]))
    CpuLambBuilder.recipe, CpuLambBuilder.built_ahead = lambda self: made, lambda self: False
    runs = [Run(length, shifts=(at,) * 5) for at in (0, 1, 3) for length in (*LENGTHS, 8193, 40_001)]
    runs += [Run(2049, types=types, shifts=ALIKE) for types in MIXTURES]
    small, large = [each._replace(layer=i) for i, each in enumerate(runs)], [Run(2_900_001, 0, shifts=ALIKE), Run(70_001, 1)]
    op = CpuOp()
    for name in SETS[: SETS.index(op._op.instruction_set()) + 1]:
        os.environ["DS_TERAPIPE_LAMB_ISA"] = name
        for count, each in itertools.product((1, 3), (small, large)):
            torch.set_num_threads(count)
            for way in (run, run_in_phases):
                way(op, case := Case(each))
                assert case.control[3] == 0


def test_no_access_outside_and_nothing_undefined(tmp_path: Path) -> None:
    # Threads that OpenMP keeps to the end are no leak; LeakSanitizer cannot run under a debugger or in some containers.
    # Its copies of stack frames are not aligned for AVX-512.
    options = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "OMP_NUM_THREADS": "3"}
    done = run_under("libasan.so", f"{__name__}.watched_steps", TORCH_EXTENSIONS_DIR=str(tmp_path), **options)
    assert done.returncode == 0, done.stderr[:5000]
