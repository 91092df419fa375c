"""The CUDA kernels on the host: their source, unchanged, compiled by a C++ compiler with stand-ins for CUDA's headers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "csrc" / "lamb"
COMPILER = shutil.which("g++")
# As on the device, nothing is fused but what is written so.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
# Few threads and short chunks: the same paths with less work for the sanitizer.
SMALL = ("-DLAMB_CUDA_THREADS=64", "-DLAMB_CUDA_CHUNK=256")


def module(folder: Path, flags: Sequence[str] = ()) -> ModuleType:
    """The bindings and the kernels, compiled into ``folder``, as a module like the one for CUDA."""
    import pybind11

    pybind = [f"-isystem{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    emulated = [f"-I{HERE}", f"-I{SOURCES}", *flags]
    parts = {
        "kernels.o": [*emulated, "-xc++", str(SOURCES / "lamb_cuda.cu")],
        "fibers.o": [str(HERE / "fibers.cpp")],
        "bindings.o": ["-fvisibility=hidden", *pybind, str(SOURCES / "bindings_cuda.cpp")],
    }
    running = [
        subprocess.Popen([str(COMPILER), *FLAGS, "-c", *arguments, "-o", str(folder / name)])
        for name, arguments in parts.items()
    ]
    assert [process.wait() for process in running] == [0] * len(parts)
    path = folder / "_lamb_cuda.so"
    objects = [str(folder / name) for name in parts]
    subprocess.run([str(COMPILER), "-shared", "-pthread", *objects, "-o", str(path)], check=True)
    spec = importlib.util.spec_from_file_location("_lamb_cuda", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def races(folder: Path, kernels: str | None = None) -> Path:
    """The program of races.cpp under ThreadSanitizer.

    Args:
        folder: where to put it.
        kernels: the text of lamb_cuda.cu, for one that is wrong on purpose.
    """
    source = SOURCES / "lamb_cuda.cu"
    if kernels is not None:
        source = folder / "changed.cu"
        source.write_text(kernels, encoding="utf-8")
    fibers, program = folder / "fibers.o", folder / "races"
    flags = [*FLAGS, "-g1", *SMALL]
    build = [str(COMPILER), *flags, "-DEMULATION_TSAN", "-c", str(HERE / "fibers.cpp"), "-o", str(fibers)]
    subprocess.run(build, check=True)
    inputs = ["-xc++", str(source), str(HERE / "races.cpp"), "-xnone", str(fibers)]
    emulated = ["-fsanitize=thread", f"-I{HERE}", f"-I{SOURCES}"]
    subprocess.run([str(COMPILER), *flags, *emulated, *inputs, "-pthread", "-o", str(program)], check=True)
    return program


def run_races(program: Path, seed: int) -> subprocess.CompletedProcess[str]:
    """Run the program of :func:`races`; status 66 is ThreadSanitizer's, negative the emulation's refusal."""
    environment = {**os.environ, "EMULATION_SEED": str(seed), "EMULATION_WORKERS": "3"}
    return subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False, timeout=120)
