"""Operators of slices in C++ (csrc/slices), compiled at first use.

They make the same calls of ATen as the Python of this folder, which runs where they cannot be compiled. On small
layers, and on fast devices, that Python takes longer than the kernels.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.logging import print_dist
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe import jit

logger = logging.getLogger(__name__)

_MODULE = "_slices"
_KINDS = {Tensor, Parameter}


@functools.cache
def load() -> Any | None:
    """Return the module, compiled by the first process that asks for it; None, with a line, where that is impossible."""
    try:
        made = recipe()
        if not jit.module_path(made).is_file() and jit.why_not(made) is None:
            print_dist("compiling the operators of slices, once, which takes about half a minute", ranks=[0])
        return jit.import_from(f"{__package__}.{_MODULE}", jit.obtain(made))
    except (jit.BuildError, ImportError, OSError) as error:
        logger.warning("operators of slices: not compiled, slices run the same in Python, only slower: %s", error)
        return None


def recipe() -> jit.Recipe:
    """Return the recipe for compiling the module: C++ alone, for any device."""
    root = Path(torch.__file__).parent
    headers = [f"-isystem{root / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    # another PyTorch gets a module of its own: flags are in the name of its folder
    flags = ("-std=c++20", *headers, abi, f"-DBUILT_FOR={torch.__version__}")
    return jit.recipe(_MODULE, ("slices.cpp",), flags, ldflags=libraries, folder="slices")


def suits(*tensors: Tensor) -> bool:
    """Whether nothing sees calls of PyTorch's Python API on these tensors: no subclass, and no mode."""
    return not torch._C._is_torch_function_mode_enabled() and _KINDS.issuperset(map(type, tensors))
