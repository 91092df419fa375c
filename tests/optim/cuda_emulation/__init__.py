"""The CUDA kernels on the host: their source, unchanged, compiled by a C++ compiler with stand-ins for CUDA's headers."""

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pybind11

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "lamb"
COMPILER = shutil.which("g++")
# As on the device, nothing is fused but what is written so. Few threads and short chunks: the same paths with less work.
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
    "-DLAMB_CUDA_THREADS=64", "-DLAMB_CUDA_CHUNK=256",
)  # fmt: skip
EMULATED = (f"-I{HERE}", f"-I{SOURCES}", "-xc++")


def compiled(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([str(COMPILER), *FLAGS, *map(str, arguments)])


def module(folder: Path) -> ModuleType:
    """The bindings and the kernels, compiled into ``folder``, as a module like the one for CUDA."""
    python = [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    parts = {
        folder / "kernels.o": [*EMULATED, SOURCES / "lamb_cuda.cu"],
        folder / "fibers.o": [HERE / "fibers.cpp"],
        folder / "bindings.o": ["-fvisibility=hidden", *python, SOURCES / "bindings_cuda.cpp"],
    }
    running = [compiled("-c", *arguments, "-o", path) for path, arguments in parts.items()]
    assert [process.wait() for process in running] == [0] * len(parts)
    path = folder / "_lamb_cuda.so"
    assert compiled("-shared", "-pthread", *parts, "-o", path).wait() == 0
    spec = importlib.util.spec_from_file_location("_lamb_cuda", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def races(folder: Path, kernels: str) -> Path:
    """The program of races.cpp under ThreadSanitizer; ``kernels`` is the text of lamb_cuda.cu, right or wrong on purpose."""
    source, fibers, program = folder / "kernels.cu", folder / "fibers.o", folder / "races"
    source.write_text(kernels, encoding="utf-8")
    assert compiled("-g1", "-DEMULATION_TSAN", "-c", HERE / "fibers.cpp", "-o", fibers).wait() == 0
    inputs = [*EMULATED, source, HERE / "races.cpp", "-xnone", fibers]
    assert compiled("-g1", "-fsanitize=thread", *inputs, "-pthread", "-o", program).wait() == 0
    return program


def run_races(program: Path, seed: int) -> subprocess.CompletedProcess[str]:
    """Run the program of :func:`races`; status 66 is ThreadSanitizer's, negative the emulation's refusal."""
    environment = {**os.environ, "EMULATION_SEED": str(seed), "EMULATION_WORKERS": "3"}
    return subprocess.run([program], env=environment, capture_output=True, text=True, check=False, timeout=120)
