"""Compiles an extension module, once for a user and a version of its sources.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 600.0
_POLL_S = 0.05


class BuildError(RuntimeError):
    """The module cannot be compiled; the message gives the reason."""


@dataclass(frozen=True)
class Recipe:
    """Recipe for compiling a module.

    Attributes:
        module: its name, which its init function carries.
        sources: absolute paths, all in one folder with their headers; those that end in .cu are compiled by nvcc.
        cxx_args: flags for the C++ compiler.
        nvcc_args: flags for nvcc.
        ldflags: flags of the link.
    """

    module: str
    sources: tuple[str, ...]
    cxx_args: tuple[str, ...]
    nvcc_args: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()

    @property
    def uses_nvcc(self) -> bool:
        return any(source.endswith(".cu") for source in self.sources)


def source_folder(name: str = "lamb") -> Path:
    """Return the folder csrc/``name``: inside an installed package, beside the package in a checkout.

    Raises:
        BuildError: if it is in neither place.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc" / name, package.parent / "csrc" / name):
        if folder.is_dir():
            return folder
    raise BuildError(f"the sources of the op are not in {package / 'csrc' / name}")


def recipe(
    module: str,
    sources: Sequence[str],
    cxx_args: Sequence[str],
    nvcc_args: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    folder: str = "lamb",
) -> Recipe:
    """Return the recipe of an op whose sources are in csrc/``folder``, with the flags that all have.

    Raises:
        BuildError: if the sources are not there.
    """
    paths = tuple(str(source_folder(folder) / name) for name in sources)
    common = ("-O3", "-std=c++17")
    flags = (*common, "-fPIC", "-fvisibility=hidden", "-g0", *cxx_args)
    return Recipe(module, paths, flags, (*common, "-Xcompiler=-fPIC,-fvisibility=hidden", *nvcc_args), tuple(ldflags))


def cpu_recipe() -> Recipe:
    """Return the recipe of the CPU op, for compilation at first use and ahead."""
    kernels = ("lamb_cpu_scalar.cpp", "lamb_cpu_avx2.cpp", "lamb_cpu_avx512.cpp")
    # No -march and no fast maths; contraction is off because results must not depend on what a compiler likes to fuse.
    flags = ("-fopenmp", "-ffp-contract=off", "-fno-math-errno")
    sources = ("bindings.cpp", "lamb_cpu.cpp", "lamb_cpu_check.cpp", *kernels)
    return recipe("_lamb_cpu", sources, flags, ldflags=("-fopenmp",))


def compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX, else c++, g++ or clang++, the first that exists; empty without any.

    CXX may have arguments, and be another program's: ``ccache g++``.
    """
    given = os.environ.get("CXX", "").strip()
    commands = map(shlex.split, [given] if given else ["c++", "g++", "clang++"])
    return next(([path, *arguments] for name, *arguments in commands if (path := shutil.which(name))), [])


def nvcc() -> str | None:
    """The CUDA compiler: that of CUDA_HOME, else the one on PATH."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (home and shutil.which("nvcc", path=str(Path(home) / "bin"))) or shutil.which("nvcc")


def pybind11_include() -> str | None:
    """The folder of pybind11's headers, None if it is not installed."""
    try:
        return str(importlib.import_module("pybind11").get_include())
    except ImportError:
        return None


def why_not(recipe: Recipe) -> str | None:
    """Return in one line the first requirement for compiling that is missing; None if nothing is."""
    if not compiler():
        return "no C++ compiler (CXX, c++, g++, clang++)"
    if pybind11_include() is None:
        return "pybind11 is not installed (pip install pybind11)"
    headers = sysconfig.get_path("include")
    if not Path(headers, "Python.h").is_file():
        return f"Python's headers are not in {headers} (install python3-dev)"
    if recipe.uses_nvcc and nvcc() is None:
        return "nvcc is not on PATH and not in CUDA_HOME"
    return None


def digest(recipe: Recipe) -> str:
    """Twelve hex digits that differ when the sources, the flags, the compilers or Python's version do."""
    key = hashlib.sha256()
    tools = [" ".join(compiler()), (nvcc() or "") if recipe.uses_nvcc else "", sys.version, sysconfig.get_platform()]
    parts = [recipe.module, *tools, *recipe.cxx_args, *recipe.nvcc_args, *recipe.ldflags]
    key.update("\0".join(parts).encode())
    key.update(source_digest(recipe).encode())
    return key.hexdigest()[:12]


def source_digest(recipe: Recipe) -> str:
    """Twelve hex digits of the sources and headers alone: the module carries them, to be told from another version's."""
    key, sources = hashlib.sha256(), [Path(source) for source in recipe.sources]
    for path in sorted({*sources, *(path for source in sources for path in source.parent.glob("*.*h"))}):
        key.update(path.name.encode() + b"\0" + path.read_bytes())
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent} ({error.strerror}), set TORCH_EXTENSIONS_DIR") from error
    with _locked(path.parent / "lock", lock_timeout_s):
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
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build_") as folder:
        objects = [str(Path(folder, f"{number}.o")) for number in range(len(recipe.sources))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(_compile, recipe), recipe.sources, objects))
        module = str(Path(folder, "module.so"))
        linker = [str(nvcc())] if recipe.uses_nvcc else compiler()
        _run(recipe, *linker, "-shared", *objects, *recipe.ldflags, "-o", module)
        os.replace(module, path)


def _compile(recipe: Recipe, source: str, target: str) -> None:
    if source.endswith(".cu"):
        _run(recipe, str(nvcc()), *recipe.nvcc_args, "-c", source, "-o", target)
        return
    folders = pybind11_include(), sysconfig.get_path("include")
    includes = [part for folder in folders for part in ("-isystem", str(folder))]
    define = f"-DLAMB_DIGEST={source_digest(recipe)}"
    _run(recipe, *compiler(), *recipe.cxx_args, *includes, define, "-c", source, "-o", target)


def _run(recipe: Recipe, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
        raise BuildError(f"compiling {recipe.module} failed:\n{tail}")


def import_from(name: str, path: Path) -> ModuleType:
    """Import the extension module at ``path`` under the dotted ``name``."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _locked(lock: Path, timeout_s: float) -> Iterator[None]:
    with open(lock, "a+", encoding="utf-8") as file:
        end = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise BuildError(f"another process compiles and holds {lock}, for {timeout_s:.0f} s") from error
            except OSError as error:  # a file system without such locks
                raise BuildError(f"cannot lock {lock} ({error.strerror}), set TORCH_EXTENSIONS_DIR") from error
            time.sleep(_POLL_S)
        yield
