"""Builds the stand-in runtime, and prints the environment that turns it on.

``eval "$(python -m tests.device_stand_in.build [FOLDER])"``; the default folder is the user's cache.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared")
_DRIVER = "libcuda.cpp"
_NEEDED = ("cuda_runtime_api.h", "crt/host_defines.h")


class CannotBuild(RuntimeError):
    """The stand-in cannot be compiled here; the message says what is missing."""


def cuda_headers() -> Path:
    """Return the folder of CUDA's headers: CUDA_HOME's, the usual one, or that of NVIDIA's wheels."""
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/include"))
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for folder in [*(Path(home, "include") for home in homes if home), *wheels]:
        if all((folder / name).is_file() for name in _NEEDED):
            return folder
    raise CannotBuild(f"no folder has {' and '.join(_NEEDED)}: set CUDA_HOME, or install nvidia-cuda-crt")


def build(folder: Path | None = None) -> dict[str, str]:
    """Compile, unless it is done, and return the environment for a process on the stand-in.

    The libraries go into ``folder``, or into one of the user's cache that is named by a digest of the sources.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuild("no C++ compiler: install g++, or set CXX")
    headers = cuda_headers()
    runtime = sorted(path for path in SOURCES.glob("*.cpp") if path.name != _DRIVER)
    if folder is None:
        digest = hashlib.blake2b(repr((compiler, headers, FLAGS)).encode(), digest_size=8)
        for path in [*runtime, SOURCES / _DRIVER, *sorted(SOURCES.glob("*.h"))]:
            digest.update(path.read_bytes())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "ds_terapipe" / "device_stand_in" / digest.hexdigest()
    if not (folder / "libcuda.so.1").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        include = [f"-isystem{headers}", "-xc++"]
        _compile(compiler, [*include, *map(str, runtime), "-lpthread", "-lrt"], folder / "libstand_in.so")
        _compile(compiler, [str(SOURCES / _DRIVER), "-Wl,-soname,libcuda.so.1"], folder / "libcuda.so.1")
    return {
        "LD_PRELOAD": str(folder / "libstand_in.so"), "LD_LIBRARY_PATH": str(folder), "DS_ACCELERATOR": "cuda",
        "OMP_NUM_THREADS": "1", "TORCH_DISABLE_NATIVE_JIT": "1",  # Triton would compile for a device
    }  # fmt: skip


def _compile(compiler: str, arguments: list[str], library: Path) -> None:
    """Compile into a file of its own first: two processes may build at once."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        done = subprocess.run([compiler, *FLAGS, *arguments, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            raise CannotBuild(f"{library.name} does not compile:\n{done.stderr}")
        made.replace(library)


if __name__ == "__main__":
    for name, value in build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None).items():
        print(f"export {name}={shlex.quote(value)}")
