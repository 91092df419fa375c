"""The CUDA kernels on the host: their source, unchanged, compiled by a C++ compiler with stand-ins for CUDA's headers."""

import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11
import torch

from ds_terapipe.jit import import_from

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "lamb"
KERNELS = (SOURCES / "lamb_cuda.cu").read_text(encoding="utf-8")
COMPILER = shutil.which("g++")
# As on the device, nothing is fused but what is written so. Few threads and short chunks: the same paths with less work.
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
    "-DLAMB_CUDA_THREADS=64", "-DLAMB_CUDA_CHUNK=256",
)  # fmt: skip


def compiled(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([str(COMPILER), *FLAGS, *map(str, arguments)])


def module(folder: Path, kernels: str = KERNELS, watched: bool = False) -> ModuleType:
    """The bindings and the kernels, compiled into ``folder``, as a module like the one for CUDA.

    Args:
        folder: keeps the module as ``_lamb_cuda.so``.
        kernels: the text of lamb_cuda.cu, right or wrong on purpose.
        watched: whether ThreadSanitizer watches the kernels, whose library must be in front of all others when this is called.
    """
    (folder / "kernels.cu").write_text(kernels, encoding="utf-8")
    sanitizer, fibers = (["-g1", "-fsanitize=thread"], ["-DEMULATION_TSAN"]) if watched else ([], [])
    python = [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    headers = [f"-I{HERE}", f"-I{SOURCES}", f"-isystem{Path(torch.__file__).parent / 'include'}"]
    parts = {
        folder / "kernels.o": [*sanitizer, *headers, "-xc++", folder / "kernels.cu"],
        folder / "fibers.o": [*fibers, HERE / "fibers.cpp"],
        folder / "bindings.o": ["-fvisibility=hidden", *python, SOURCES / "bindings_cuda.cpp"],
    }
    running = [compiled("-c", *arguments, "-o", path) for path, arguments in parts.items()]
    assert [process.wait() for process in running] == [0] * len(parts)
    path = folder / "_lamb_cuda.so"
    assert compiled("-shared", "-pthread", *sanitizer, *parts, "-o", path).wait() == 0
    return import_from("_lamb_cuda", path)
