"""Installs ds_terapipe: the package, an entry point that PyTorch loads, and the command ``ds_terapipe``.

FusedLamb's op is compiled at its first use from the sources that are installed with the package, or now with
``DS_BUILD_FUSED_LAMB_TERAPIPE=1``. The operators of slices are compiled at their first use.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
README = ROOT / "README.md"
AHEAD = os.environ.get("DS_BUILD_FUSED_LAMB_TERAPIPE", "0") == "1"


class WithSources(build_py):
    """Puts csrc/ into the package, where an installed one looks for it; a checkout has it beside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "csrc", Path(self.build_lib, "ds_terapipe", "csrc"), dirs_exist_ok=True)


class AheadOfTime(build_ext):
    """Compiles the op as its first use would."""

    def build_extension(self, ext: Extension) -> None:
        jit = _jit()
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        jit.compile_to(jit.cpu_recipe(), target)


def _jit() -> ModuleType:
    """ds_terapipe/jit.py alone: it imports the standard library only, the package would import DeepSpeed."""
    spec = importlib.util.spec_from_file_location("_ds_terapipe_jit", ROOT / "ds_terapipe" / "jit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


setup(
    name="ds_terapipe",
    version="0.1.0",
    description="Token-slice pipelining, elastic freezing and a fused LAMB inside DeepSpeed, turned on by JSON keys",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["ds_terapipe", "ds_terapipe.*"]),
    package_data={"ds_terapipe": ["private_names.ini"]},
    ext_modules=[Extension("ds_terapipe.optim._lamb_cpu", [])] if AHEAD else [],
    cmdclass={"build_py": WithSources, "build_ext": AheadOfTime},
    install_requires=["torch>=2.11", "numpy", "deepspeed>=0.19.8,<0.20", "ninja", "pybind11", "tqdm", "zlib-ng"],
    extras_require={
        "megatron": ["megatron-core>=0.16,<0.20"],
        "hf": ["transformers>=5.0,<6", "safetensors", "peft>=0.18,<1"],
        "dev": [
            "accelerate",
            "fastjsonschema",
            "hypothesis",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "tensorboard",
        ],
    },
    entry_points={
        "torch.backends": ["ds_terapipe = ds_terapipe.autoload:load"],
        "console_scripts": ["ds_terapipe = ds_terapipe.cli:main"],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
