"""FusedLamb's ops as DeepSpeed op builders: found built ahead, else compiled at first use.

They follow the conventions of ``deepspeed.ops.op_builder.builder.OpBuilder`` (DeepSpeed 0.19.8), so that its report shows them
and ``.load()`` gives the module. How they are compiled is jit.py's: PyTorch's own loader would add its headers, half a minute of
compilation, and a lock file that a killed build leaves behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from types import ModuleType
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_terapipe import jit

logger = logging.getLogger(__name__)


class _LambBuilder(OpBuilder):
    """Base of both builders. Subclasses set ``NAME`` and ``MODULE``, and have a recipe."""

    BUILD_VAR = "DS_BUILD_FUSED_LAMB_TERAPIPE"
    NAME = ""
    MODULE = ""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name or self.NAME)

    def recipe(self) -> jit.Recipe:
        """Return the recipe by which jit.py compiles the module.

        Raises:
            jit.BuildError: if the sources are not there.
        """
        raise NotImplementedError

    def absolute_name(self) -> str:
        """Return the import name of a module that was built ahead."""
        return f"ds_terapipe.optim.{self.MODULE}"

    def sources(self) -> list[str]:
        """Absolute paths."""
        return list(self.recipe().sources)

    def cxx_args(self) -> list[str]:
        return list(self.recipe().cxx_args)

    def built_ahead(self) -> bool:
        """Whether the installed package has the module."""
        return importlib.util.find_spec(self.absolute_name()) is not None

    def why_not(self) -> str | None:
        """Why the op cannot be used here, in one line; None if it can, or at least nothing is missing to compile it."""
        if self.built_ahead():
            return None
        try:
            return jit.why_not(self.recipe())
        except jit.BuildError as error:
            return str(error)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op is built or can be compiled here; ``verbose`` logs why not."""
        self.error_log = self.why_not()
        if self.error_log and verbose:
            logger.warning("%s: %s", self.name, self.error_log)
        return self.error_log is None

    def load(self, verbose: bool = False) -> ModuleType:
        """The op's module, the same object at every call in a process.

        Raises:
            RuntimeError: with the reason, if it was not built ahead and cannot be compiled.
        """
        loaded: dict[str, Any] = OpBuilder._loaded_ops
        if self.name not in loaded:
            loaded[self.name] = self._ahead() or self.jit_load(verbose)
        found: ModuleType = loaded[self.name]
        return found

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Compile the module unless the cache has it, and import it."""
        return jit.import_from(self.absolute_name(), jit.obtain(self.recipe()))

    def _ahead(self) -> ModuleType | None:
        """Return the module built ahead, unless the sources have changed since: a checkout may be updated."""
        if not self.built_ahead():
            return None
        try:
            module = importlib.import_module(self.absolute_name())
            current = jit.source_digest(self.recipe())
        except ImportError as error:
            logger.warning("%s: built ahead, but cannot be imported (%s); compiling it", self.name, error)
            return None
        except (jit.BuildError, OSError):  # without sources
            return module
        if getattr(module, "digest", current) == current:
            return module
        logger.warning("%s: was built ahead of other sources than the installed ones; compiling it", self.name)
        return None


class CpuLambBuilder(_LambBuilder):
    """The CPU op. It picks its instruction set when it runs, so one module serves every processor of an architecture."""

    NAME = "fused_lamb_terapipe_cpu"
    MODULE = "_lamb_cpu"

    def recipe(self) -> jit.Recipe:
        return jit.cpu_recipe()

    def status(self) -> tuple[bool, str]:
        """Whether the op can be used, and the instruction set that it picks or the reason. Compiles it if that is still to do."""
        try:
            return True, f"instruction set {self.load().instruction_set()}"
        except (RuntimeError, ValueError, ImportError) as error:
            return False, str(error)


class CudaLambBuilder(_LambBuilder):
    """The CUDA op: files that include headers of the CUDA runtime only."""

    NAME = "fused_lamb_terapipe_cuda"
    MODULE = "_lamb_cuda"

    def recipe(self) -> jit.Recipe:
        return jit.recipe(self.MODULE, ("bindings_cuda.cpp", "lamb_cuda.cu"), (), _architectures())

    def why_not(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        return super().why_not()

    def status(self) -> tuple[bool, str]:
        """Whether the op can be used, and why not or how it comes to be. Compiles nothing."""
        reason = self.why_not()
        if reason:
            return False, reason
        here = self.built_ahead() or jit.module_path(self.recipe()).is_file()
        return True, "" if here else "is compiled at first use"


def _architectures() -> list[str]:
    """Return flags for the architectures of TORCH_CUDA_ARCH_LIST, e.g. "8.0;9.0+PTX", else of the devices here.

    Without either, 8.0 and 9.0.
    """
    if not os.environ.get("TORCH_CUDA_ARCH_LIST") and not torch.cuda.device_count():
        return [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ("80", "90")]
    from torch.utils.cpp_extension import _get_cuda_arch_flags

    try:
        return list(_get_cuda_arch_flags())
    except ValueError as error:  # a list of what PyTorch does not know
        raise RuntimeError(f"TORCH_CUDA_ARCH_LIST: {error}") from error


def builders() -> list[_LambBuilder]:
    """The builders of the ops, as the report lists them."""
    return [CpuLambBuilder(), CudaLambBuilder()]
