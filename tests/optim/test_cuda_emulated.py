"""The CUDA kernels without a GPU: their source, unchanged, run on the host by cuda_emulation, against float64."""

import os
import re
import signal
from pathlib import Path

import pytest

from ds_terapipe.optim.op.cuda_op import CudaOp

from . import cuda_emulation
from .op_tests import MIXED, CudaTests
from .sanitizers import run_under
from .tables import Case, run

pytestmark = pytest.mark.skipif(cuda_emulation.COMPILER is None, reason="no g++")


@pytest.fixture(scope="module")
def op(tmp_path_factory: pytest.TempPathFactory) -> CudaOp:
    return CudaOp(cuda_emulation.module(tmp_path_factory.mktemp("emulated")))


class TestEmulated(CudaTests):
    """Blocks of 64 threads and chunks of 256 elements."""

    long_everywhere = False


WATCHED = f"{__name__}.watched_steps"
BARRIERS = list(re.finditer(r"__(syncthreads|threadfence)\(\);", cuda_emulation.KERNELS))


def watched_steps(folder: str, kernels: str) -> None:
    """Steps under ThreadSanitizer, with blocks and threads in other orders each time."""
    op, case = CudaOp(cuda_emulation.module(Path(folder), kernels, watched=True)), Case(MIXED, layers=8)
    os.environ["EMULATION_WORKERS"] = "4"  # all blocks at once: a later one could get the identities of an ended one's threads
    for seed in range(4):
        os.environ["EMULATION_SEED"] = str(seed)
        case.set_control(max_norm=1.0)
        run(op, case, advance=True)


def test_no_races(tmp_path: Path) -> None:
    done = run_under("libtsan.so", WATCHED, tmp_path, cuda_emulation.KERNELS)
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.parametrize("index", [pytest.param(i, marks=[] if i == 1 else [pytest.mark.full]) for i in range(len(BARRIERS))])
def test_no_barrier_and_no_fence_is_there_for_nothing(tmp_path: Path, index: int) -> None:
    start, end = BARRIERS[index].span()
    kernels = cuda_emulation.KERNELS
    done = run_under("libtsan.so", WATCHED, tmp_path, kernels[:start] + ";" + kernels[end:])
    line = kernels[:start].count("\n") + 1
    # the sanitizer's status, or the emulation refuses
    assert done.returncode in (66, -signal.SIGABRT), f"nothing noticed that line {line} was missing: {done.stderr[-3000:]}"
