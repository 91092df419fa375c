"""The CPU op under AddressSanitizer and UndefinedBehaviorSanitizer, once for each instruction set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ds_terapipe.optim.op import jit
from ds_terapipe.optim.op.builder import CpuLambBuilder

FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1", "-Wno-maybe-uninitialized"]


def _compile(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(jit.compiler()), *arguments], capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver sanitize.cpp and the sources of the op, without those that need Python."""
    folder = tmp_path_factory.mktemp("sanitize")
    if jit.compiler() is None:
        pytest.skip("no C++ compiler")
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    if _compile([*FLAGS, str(folder / "empty.cpp"), "-o", str(folder / "empty")]).returncode:
        pytest.skip("the compiler has no sanitizer runtime")
    builder = CpuLambBuilder()
    kept = [flag for flag in builder.cxx_args() if not flag.startswith(("-O", "-g"))]
    sources = [source for source in builder.sources() if not source.endswith("bindings.cpp")]
    sources.append(str(Path(__file__).with_name("sanitize.cpp")))
    done = _compile([*kept, *FLAGS, f"-I{jit.source_folder()}", *sources, "-o", str(folder / "sanitize")])
    assert done.returncode == 0, done.stderr
    return folder / "sanitize"


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512"])
def test_no_access_outside_and_nothing_undefined(program: Path, isa: str) -> None:
    environment = {**os.environ, "DS_TERAPIPE_LAMB_ISA": isa, "OMP_NUM_THREADS": "3"}
    # Threads that OpenMP keeps to the end are no leak; LeakSanitizer cannot run under a debugger or in some containers.
    # Its copies of stack frames are not aligned for AVX-512.
    environment["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0"
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=False, timeout=120)
    if "this processor has" in done.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [isa]


def test_the_sanitizer_sees_a_write_behind_the_end(program: Path, tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int main(int n, char**) { char* a = new char[8]; a[7 + n] = 1; return a[0]; }\n")
    assert _compile([*FLAGS, str(source), "-o", str(tmp_path / "wrong")]).returncode == 0
    done = subprocess.run([str(tmp_path / "wrong")], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0 and "wrong.cpp:1" in done.stderr
