"""FusedLamb's CUDA op on the stand-in: its kernels, unchanged, run on the host (``tests/optim/cuda_emulation``).

``python -m tests.device_stand_in.lamb`` compiles them beside the stand-in, before ranks want them all at once.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder

from ds_terapipe.jit import import_from
from ds_terapipe.optim.op.builder import CudaLambBuilder
from tests.device_stand_in import compute
from tests.optim import cuda_emulation

_KERNELS = ("square_sum", "moments", "apply", "copy_rules")


def module() -> Any:
    """Return the compiled module, compiled now if it is not there."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in (cuda_emulation.SOURCES, cuda_emulation.HERE):
        for path in sorted(folder.glob("*.[ch]*")):
            digest.update(path.read_bytes())
    folder = Path(os.environ["LD_PRELOAD"]).parent / f"lamb_{digest.hexdigest()}"
    made = folder / "_lamb_cuda.so"
    if made.is_file():
        return import_from("_lamb_cuda", made)
    folder.mkdir(exist_ok=True)
    return cuda_emulation.module(folder)


def _waiting(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, begun when its stream has come to it."""

    def launched(*arguments: Any) -> Any:
        compute.wait()
        return kernel(*arguments)

    return launched


def install() -> None:
    """Have CudaOp find the emulated kernels."""
    found = module()
    waiting = {name: _waiting(getattr(found, name)) for name in _KERNELS}
    OpBuilder._loaded_ops[CudaLambBuilder.NAME] = SimpleNamespace(**{**vars(found), **waiting})


if __name__ == "__main__":
    module()
