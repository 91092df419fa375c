"""The CUDA kernels without a GPU: their source, unchanged, run on the host by cuda_emulation, against float64."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from ds_terapipe.optim.op.cuda_op import CudaOp

from . import cuda_emulation
from .op_tests import MIXED, CudaTests
from .tables import Case, run, run_in_phases, same

pytestmark = pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="no g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return cuda_emulation.module(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def op(library: ModuleType) -> CudaOp:
    return CudaOp(library)


class TestEmulated(CudaTests):
    """Blocks of 64 threads and chunks of 256 elements."""

    long_everywhere = False


def test_same_bits_in_every_order(op: CudaOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks and threads."""
    found = []
    for seed, workers, way in ((0, 1, run), (1, 2, run), (2, 4, run_in_phases)):
        monkeypatch.setenv("EMULATION_SEED", str(seed))
        monkeypatch.setenv("EMULATION_WORKERS", str(workers))
        case = Case(MIXED, layers=8)
        for _ in range(2):
            case.set_control(max_norm=1.0)
            way(op, case)
        found.append(case.bits())
    assert same(found[0], found[1]) and same(found[0], found[2])


KERNELS = (cuda_emulation.SOURCES / "lamb_cuda.cu").read_text(encoding="utf-8")
BARRIERS = list(re.finditer(r"__(syncthreads|threadfence)\(\);", KERNELS))


def test_no_races(tmp_path: Path) -> None:
    program = cuda_emulation.races(tmp_path, KERNELS)
    runs = [cuda_emulation.run_races(program, seed) for seed in (1, 2)]
    assert [done.returncode for done in runs] == [0, 0], runs[0].stderr[:3000]
    assert runs[0].stdout == runs[1].stdout


@pytest.mark.parametrize("index", [pytest.param(i, marks=[] if i == 1 else [pytest.mark.full]) for i in range(len(BARRIERS))])
def test_no_barrier_and_no_fence_is_there_for_nothing(tmp_path: Path, index: int) -> None:
    start, end = BARRIERS[index].span()
    program = cuda_emulation.races(tmp_path, KERNELS[:start] + ";" + KERNELS[end:])
    line = KERNELS[:start].count("\n") + 1
    assert cuda_emulation.run_races(program, seed=1).returncode != 0, f"nothing noticed that line {line} was missing"
