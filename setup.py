"""Installs ds_terapipe: a pure Python package, an entry point that PyTorch loads, and the command ``ds_terapipe``."""

from __future__ import annotations

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

setup(
    name="ds_terapipe",
    version="0.1.0",
    description="Token-slice pipelining (TeraPipe) inside DeepSpeed's pipeline engine, turned on by JSON keys",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["ds_terapipe", "ds_terapipe.*"]),
    install_requires=[
        "torch>=2.8",
        "numpy",
        "deepspeed>=0.19.8,<0.20",
        "ninja",
        "pybind11",
        "tqdm",
    ],
    extras_require={
        "megatron": ["megatron-core>=0.16,<0.17"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "ruff", "tensorboard"],
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
