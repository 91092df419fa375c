"""The CPU op under AddressSanitizer and UndefinedBehaviorSanitizer, once for each instruction set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ds_terapipe.optim.op import jit
from ds_terapipe.optim.op.builder import CpuLambBuilder

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1", "-Wno-maybe-uninitialized"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
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
    if jit.compiler() is None or run(compiler, *FLAGS, str(wrong), "-o", made).returncode:
        pytest.skip("no C++ compiler, or it has no sanitizer runtime")
    done = run(made)
    assert done.returncode != 0 and "wrong.cpp:1" in done.stderr
    builder = CpuLambBuilder()
    kept = [flag for flag in builder.cxx_args() if not flag.startswith(("-O", "-g"))]
    sources = [source for source in builder.sources() if not source.endswith("bindings.cpp")]
    sources += [str(Path(__file__).with_name("sanitize.cpp")), f"-I{jit.source_folder()}"]
    done = run(compiler, *kept, *FLAGS, *sources, "-o", str(folder / "sanitize"))
    assert done.returncode == 0, done.stderr
    return str(folder / "sanitize")


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_no_access_outside_and_nothing_undefined(program: str, isa: str) -> None:
    # Threads that OpenMP keeps to the end are no leak; LeakSanitizer cannot run under a debugger or in some containers.
    # Its copies of stack frames are not aligned for AVX-512.
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    done = run(program, DS_TERAPIPE_LAMB_ISA=isa, OMP_NUM_THREADS="3", ASAN_OPTIONS=options)
    if "this processor has" in done.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [isa]
