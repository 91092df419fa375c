"""The back end on the CPU, and which back end a device gets.

`Plain` says in PyTorch what each function of a back end does. All functions work in place. ``tables`` is that of segments.py.
``control`` is float64 [4]: the gradients' scale, the largest global norm or 0, the sum of squares of the gradients, and 1 if a
gradient is not finite. ``norms`` is float64 [L, 2], the sums of squares of parameters and updates of every layer; ``ratios`` is
float64 [L]. They lie on the device of the tensors. A back end with ``takes_views`` works on ``tables.views`` and not on the
addresses.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ds_terapipe.errors import bad_value
from ds_terapipe.optim.modes import key
from ds_terapipe.optim.op.cuda_op import CudaOp
from ds_terapipe.optim.op.plain import Plain
from ds_terapipe.optim.op.segments import Tables

logger = logging.getLogger(__name__)


class CpuOp:
    """The compiled op on the CPU, with as many threads as PyTorch has.

    Results are the same to the last bit for any number of threads and on every instruction set.

    Raises:
        RuntimeError: if the op cannot be loaded.
    """

    name = "cpu"
    takes_views = False

    def __init__(self) -> None:
        from ds_terapipe.optim.op.builder import CpuLambBuilder

        self._op = CpuLambBuilder().load()
        self._workspace = self._op.Workspace()

    def square_sum(self, tables: Tables, control: Tensor) -> None:
        """See :class:`Plain`. A wrong table is a ValueError, here and below, and then nothing has changed."""
        self._op.square_sum(*_arguments(tables, control))

    def moments(self, tables: Tables, norms: Tensor, control: Tensor) -> None:
        """See :class:`Plain`."""
        self._op.moments(*_arguments(tables, control, norms))

    def apply(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """See :class:`Plain`."""
        self._op.apply(*_arguments(tables, control, norms, ratios))

    def step(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """See :class:`Plain`. One parallel region; phase 2 of a layer follows its phase 1 while the cache has it."""
        self._op.step(self._workspace, *_arguments(tables, control, norms, ratios))


def _arguments(tables: Tables, control: Tensor, *results: Tensor) -> list[int]:
    """Return the arguments of a function of the op: addresses, numbers of rows, and threads."""
    tables.check(torch.device("cpu"), control, *results)
    segments, rules = ((array.data_ptr(), array.shape[0]) for array in (tables.segments, tables.rules))
    arrays = [array.data_ptr() for array in (control, *results)]
    return [*segments, *rules, tables.layers, *arrays, torch.get_num_threads()]


def pick(device: torch.device, backend: str = "auto") -> CpuOp | CudaOp | Plain:
    """The back end for tensors on ``device``.

    Args:
        device: where parameters and states are.
        backend: ``auto`` takes the compiled op of the device and, where there is none, PyTorch with a warning that says why;
            ``cpu`` and ``cuda`` want their op; ``plain`` takes PyTorch.

    Raises:
        ConfigError: for another name, and for an op that is of another device or cannot be loaded.
    """
    if backend == "plain" or (backend == "auto" and device.type not in ("cpu", "cuda")):
        return Plain()
    if backend not in ("auto", device.type):
        raise bad_value(key("backend"), backend, f"auto, plain or {device.type} for parameters on {device}", "auto")
    try:
        return CpuOp() if device.type == "cpu" else CudaOp()
    except (RuntimeError, ImportError, OSError) as error:
        if backend != "auto":
            reason = " ".join(str(error).split())
            raise bad_value(
                key("backend"), backend, f"auto or plain where the op cannot be loaded ({reason})", "auto"
            ) from error
        _warn(device.type, str(error))
        return Plain()


@functools.cache
def _warn(kind: str, reason: str) -> None:
    """Once for a reason, however many optimizers there are."""
    logger.warning("FusedLamb runs in plain PyTorch, several times slower than its %s op: %s", kind, reason)
