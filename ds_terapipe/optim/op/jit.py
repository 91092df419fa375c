"""Compiles an extension module with ninja, once for a user and a version of its sources.

Standard library only: setup.py uses it too. A module lies in a folder named by a digest of its sources, flags, compiler
and Python, so that two versions never meet. The first process compiles under a lock that the kernel releases when its
holder ends, killed or not; the others wait, then find the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 600.0
HEAD_START_S = 2.0
_POLL_S = 0.05


class BuildError(RuntimeError):
    """The module cannot be compiled; the message gives the reason."""


@dataclass(frozen=True)
class Recipe:
    """Recipe for compiling a module.

    Attributes:
        module: its name, which its init function carries.
        sources: absolute paths; those that end in .cu are compiled by nvcc.
        headers: absolute paths of included files.
        include_paths: absolute paths.
        cxx_args: flags for the C++ compiler.
        nvcc_args: flags for nvcc.
        ldflags: flags of the link.
    """

    module: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    include_paths: tuple[str, ...]
    cxx_args: tuple[str, ...]
    nvcc_args: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()

    @property
    def uses_nvcc(self) -> bool:
        return any(source.endswith(".cu") for source in self.sources)


def source_folder() -> Path:
    """Return the folder csrc/lamb: inside an installed package, beside the package in a checkout.

    Raises:
        BuildError: if it is in neither place.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "csrc" / "lamb", package.parent / "csrc" / "lamb"):
        if (folder / "segment.h").is_file():
            return folder
    raise BuildError(f"the sources of the op are not in {package / 'csrc' / 'lamb'}")


CPU_SOURCES = (
    "bindings.cpp",
    "lamb_cpu.cpp",
    "lamb_cpu_check.cpp",
    "lamb_cpu_scalar.cpp",
    "lamb_cpu_avx2.cpp",
    "lamb_cpu_avx512.cpp",
)
CPU_HEADERS = ("segment.h", "rules.h", "lamb_cpu.h", "lamb_cpu_kernels.h", "lamb_cpu_target.h")
# No -march and no fast maths; contraction is off because results must not depend on what a compiler likes to fuse.
CPU_ARGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-g0",
)


def cpu_recipe() -> Recipe:
    """Return the recipe of the CPU op, for compilation at first use and ahead.

    Raises:
        BuildError: if the sources are not there.
    """
    folder = source_folder()
    return Recipe(
        module="_lamb_cpu",
        sources=tuple(str(folder / name) for name in CPU_SOURCES),
        headers=tuple(str(folder / name) for name in CPU_HEADERS),
        include_paths=(str(folder),),
        cxx_args=CPU_ARGS,
        ldflags=("-fopenmp",),
    )


def compiler() -> str | None:
    """The C++ compiler: CXX, else c++, g++ or clang++, the first that exists."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(shlex.split(name)[0]))), None)


def nvcc() -> str | None:
    """The CUDA compiler: that of CUDA_HOME, else the one on PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (home and shutil.which("nvcc", path=str(Path(home) / "bin"))) or shutil.which("nvcc")


def ninja() -> str | None:
    """The program ninja: on PATH, else beside the interpreter, else in the package of that name."""
    found = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if found:
        return found
    if importlib.util.find_spec("ninja") is None:
        return None
    return shutil.which("ninja", path=getattr(importlib.import_module("ninja"), "BIN_DIR", None) or os.devnull)


def pybind11_include() -> str | None:
    """The folder of pybind11's headers, None if it is not installed."""
    if importlib.util.find_spec("pybind11") is None:
        return None
    return str(importlib.import_module("pybind11").get_include())


def why_not(recipe: Recipe | None = None) -> str | None:
    """Return in one line the first requirement for compiling that is missing; None if nothing is."""
    if compiler() is None:
        return "no C++ compiler (CXX, c++, g++, clang++)"
    if ninja() is None:
        return "ninja is not installed (pip install ninja)"
    if pybind11_include() is None:
        return "pybind11 is not installed (pip install pybind11)"
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        return f"Python's headers are not in {headers} (install python3-dev)"
    if recipe is not None and recipe.uses_nvcc and nvcc() is None:
        return "nvcc is not on PATH and not in CUDA_HOME"
    return None


def digest(recipe: Recipe) -> str:
    """Twelve hex digits that differ when the sources, the flags, the compilers or Python's version do."""
    key = hashlib.sha256()
    tools = [compiler() or "", (nvcc() or "") if recipe.uses_nvcc else "", sys.version, sysconfig.get_platform()]
    parts = [recipe.module, *tools, *recipe.cxx_args, *recipe.nvcc_args, *recipe.ldflags]
    key.update("\0".join(parts).encode())
    key.update(source_digest(recipe).encode())
    return key.hexdigest()[:12]


def source_digest(recipe: Recipe) -> str:
    """Twelve hex digits of the sources and headers alone: the module carries them, to be told from another version's."""
    key = hashlib.sha256()
    for path in sorted({*recipe.sources, *recipe.headers}, key=os.path.basename):
        key.update(Path(path).name.encode() + b"\0" + Path(path).read_bytes())
    return key.hexdigest()[:12]


def cache_folder() -> Path:
    """TORCH_EXTENSIONS_DIR, else the place under the user's cache where PyTorch has its own."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"


def module_path(recipe: Recipe) -> Path:
    """Return the path of the compiled module, which may not exist yet."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    tag = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return cache_folder() / f"ds_terapipe{recipe.module}_{tag}_{digest(recipe)}" / f"{recipe.module}{suffix}"


def obtain(recipe: Recipe, lock_timeout_s: float = LOCK_TIMEOUT_S) -> Path:
    """Return the compiled module's path; compiles it if necessary.

    Raises:
        BuildError: if something to compile with is missing, if the compilation fails, or if another process has been
            compiling for longer than ``lock_timeout_s``.
    """
    path = module_path(recipe)
    if path.is_file():
        return path
    if reason := why_not(recipe):
        raise BuildError(reason)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent} ({error.strerror}), set TORCH_EXTENSIONS_DIR") from error
    lock = path.parent / "lock"
    _let_first_rank_begin(path, lock)
    with _locked(lock, path.is_file, lock_timeout_s):
        if not path.is_file():
            start = time.monotonic()
            compile_to(recipe, path)
            logger.info("compiled %s in %.1f s", path, time.monotonic() - start)
    return path


def compile_to(recipe: Recipe, path: Path) -> None:
    """Compile the module to ``path``, which appears there whole or not at all.

    Raises:
        BuildError: with the last lines of the compiler's output.
    """
    if reason := why_not(recipe):
        raise BuildError(reason)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build_") as folder:
        Path(folder, "build.ninja").write_text(_ninja_file(recipe), encoding="utf-8")
        done = subprocess.run([str(ninja()), "-C", folder], capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
            raise BuildError(f"compiling {recipe.module} failed:\n{tail}")
        os.replace(Path(folder, "module.so"), path)


def import_from(name: str, path: Path) -> ModuleType:
    """Import the extension module at ``path`` under the dotted ``name``."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ninja_file(recipe: Recipe) -> str:
    pybind11, python = str(pybind11_include()), sysconfig.get_path("include")
    includes = [f"-I{path}" for path in recipe.include_paths] + [f"-isystem {path}" for path in (pybind11, python)]
    define = f"-DLAMB_DIGEST={source_digest(recipe)}"
    linker = f"{nvcc()} -shared" if recipe.uses_nvcc else f"{compiler()} -shared"
    lines = [
        f"cxx = {compiler()}",
        f"nvcc = {nvcc() or 'nvcc'}",
        f"cxx_args = {' '.join([*recipe.cxx_args, *includes, define])}",
        f"nvcc_args = {' '.join([*recipe.nvcc_args, *includes])}",
        "rule cxx\n  command = $cxx $cxx_args -c $in -o $out",
        "rule nvcc\n  command = $nvcc $nvcc_args -c $in -o $out",
        f"rule link\n  command = {linker} $in {' '.join(recipe.ldflags)} -o $out",
    ]
    objects = []
    for source in recipe.sources:
        objects.append(f"{Path(source).stem}{'_cu' if source.endswith('.cu') else ''}.o")
        lines.append(f"build {objects[-1]}: {'nvcc' if source.endswith('.cu') else 'cxx'} {_escaped(source)}")
    lines.append(f"build module.so: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _escaped(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _let_first_rank_begin(path: Path, lock: Path) -> None:
    """Give local rank 0 a head start on the lock; limited, since it may never need this module."""
    if os.environ.get("LOCAL_RANK", "0") in ("", "0"):
        return
    end = time.monotonic() + HEAD_START_S
    while time.monotonic() < end and not path.is_file() and not lock.exists():
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _locked(lock: Path, done: Callable[[], bool], timeout_s: float) -> Iterator[None]:
    """Hold the lock, or find that the protected file exists."""
    with open(lock, "a+", encoding="utf-8") as file:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if done():
                    break
                if time.monotonic() > end:
                    raise BuildError(
                        f"another process has been compiling for {timeout_s:.0f} s and holds {lock}"
                    ) from error
            time.sleep(_POLL_S)
        yield
