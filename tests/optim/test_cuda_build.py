"""The CUDA files compile for the architectures that are promised, and lean on nothing but CUDA's own headers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "lamb"
DEVICE_FILES = ("lamb_cuda.cu", "lamb_cuda_elements.cuh", "lamb_cuda.h", "rules.h", "segment.h")
ALLOWED = {
    *("cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"),
    *("cstdint", "cstddef", "cfloat", "cmath"),
    *("lamb_cuda.h", "lamb_cuda_elements.cuh", "rules.h", "segment.h"),
}
NVCC = shutil.which("nvcc")


def included(name: str) -> set[str]:
    return set(re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', (SOURCES / name).read_text(), re.M))


@pytest.mark.parametrize("name", DEVICE_FILES)
def test_device_files_include_cuda_runtime_headers_only(name: str) -> None:
    assert included(name) <= ALLOWED


def test_bindings_include_neither_cuda_nor_torch() -> None:
    assert included("bindings_cuda.cpp") == {"pybind11/pybind11.h", "cstdint", "stdexcept", "string", "lamb_cuda.h"}


def test_every_own_header_is_among_those_that_the_build_watches() -> None:
    from ds_terapipe.optim.op.builder import CudaLambBuilder

    own = {name for name in ALLOWED if (SOURCES / name).is_file()}
    assert own == set(CudaLambBuilder.HEADERS)
    assert not any("fast" in flag for flag in CudaLambBuilder().nvcc_args())


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_compiles_for_sm_80_and_sm_90_without_a_warning(tmp_path: Path) -> None:
    target = tmp_path / "lamb_cuda.o"
    # The optimisation of the device code is most of the time and finds no more errors.
    flags = ["-std=c++17", "-O1", "-Xptxas=-O1", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-Werror"]
    architectures = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ("80", "90")]
    command = [str(NVCC), *flags, *architectures, "-t2", "-c", str(SOURCES / "lamb_cuda.cu"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    contents = target.read_bytes()
    assert all(kernel in contents for kernel in (b"square_sum_kernel", b"moments_kernel", b"apply_kernel"))
