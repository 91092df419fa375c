"""The interface of a back end, the one on the CPU, and which back end a device gets.

All functions work in place. ``tables`` is that of segments.py. ``control`` is float64 [4]: the gradients' scale, the largest
global norm or 0, the sum of squares of the gradients, and 1 if a gradient is not finite. ``norms`` is float64 [L, 2], the sums of
squares of parameters and updates of every layer; ``ratios`` is float64 [L]. They lie on the device of the tensors.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ds_terapipe.errors import bad_value

if TYPE_CHECKING:
    from ds_terapipe.optim.op.segments import Tables

logger = logging.getLogger(__name__)

KEY = "optimizer.params.backend"
NAMES = ("auto", "cpu", "cuda", "plain")


class Backend(Protocol):
    """The two phases of a step and the read of the gradients before them; the formula is that of csrc/lamb/segment.h."""

    name: str
    takes_views: bool
    """Whether it works on ``tables.views`` and not on the addresses."""

    def square_sum(self, tables: Tables, control: Tensor) -> None:
        """Add the squares of the counted gradients, unscaled, to ``control[2]``; set ``control[3]`` to 1 if any is nan or inf."""

    def moments(self, tables: Tables, norms: Tensor, control: Tensor) -> None:
        """Phase 1: update both moments, overwrite ``norms``. Nothing if ``control[3]`` is not 0."""

    def apply(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """Phase 2: from ``norms`` write ``ratios``, the parameters and their copies. Nothing if ``control[3]`` is not 0."""

    def step(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """Both phases at once, for layers that lie wholly in these tables."""


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

    @property
    def instruction_set(self) -> str:
        """avx512, avx2 or scalar."""
        return str(self._op.instruction_set())

    def square_sum(self, tables: Tables, control: Tensor) -> None:
        """See :class:`Backend`. A wrong table is a ValueError, here and below, and then nothing has changed."""
        self._op.square_sum(*_addresses(tables, control), torch.get_num_threads())

    def moments(self, tables: Tables, norms: Tensor, control: Tensor) -> None:
        """See :class:`Backend`."""
        _check("norms", norms, 2 * tables.layers)
        self._op.moments(*_addresses(tables, control), norms.data_ptr(), torch.get_num_threads())

    def apply(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """See :class:`Backend`."""
        _check("norms", norms, 2 * tables.layers)
        _check("ratios", ratios, tables.layers)
        arguments = _addresses(tables, control)
        self._op.apply(*arguments, norms.data_ptr(), ratios.data_ptr(), torch.get_num_threads())

    def step(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor) -> None:
        """See :class:`Backend`. One parallel region; phase 2 of a layer follows its phase 1 while the cache has it."""
        _check("norms", norms, 2 * tables.layers)
        _check("ratios", ratios, tables.layers)
        arguments = _addresses(tables, control)
        self._op.step(self._workspace, *arguments, norms.data_ptr(), ratios.data_ptr(), torch.get_num_threads())


def pick(device: torch.device, backend: str = "auto") -> Backend:
    """The back end for tensors on ``device``.

    Args:
        device: where parameters and states are.
        backend: ``auto`` takes the compiled op of the device and, where there is none, PyTorch with a warning that says why;
            ``cpu`` and ``cuda`` want their op; ``plain`` takes PyTorch.

    Raises:
        ConfigError: for another name, and for an op that is of another device or cannot be loaded.
    """
    if backend not in NAMES:
        raise bad_value(KEY, backend, "one of " + ", ".join(NAMES), "auto")
    if backend == "plain" or (backend == "auto" and device.type not in ("cpu", "cuda")):
        return _plain()
    if backend not in ("auto", device.type):
        raise bad_value(KEY, backend, f"auto, plain or {device.type} for parameters on {device}", "auto")
    try:
        return _op(device.type)
    except (RuntimeError, ImportError, OSError) as error:
        if backend != "auto":
            reason = " ".join(str(error).split())
            raise bad_value(KEY, backend, f"auto or plain where the op cannot be loaded ({reason})", "auto") from error
        _warn(device.type, str(error))
        return _plain()


def _op(kind: str) -> Backend:
    if kind == "cpu":
        return CpuOp()
    from ds_terapipe.optim.op.cuda_op import CudaOp

    return CudaOp()


def _plain() -> Backend:
    from ds_terapipe.optim.op.plain import Plain

    return Plain()


@functools.cache
def _warn(kind: str, reason: str) -> None:
    """Once for a reason, however many optimizers there are."""
    logger.warning("FusedLamb runs in plain PyTorch, several times slower than its %s op: %s", kind, reason)


def _addresses(tables: Tables, control: Tensor) -> tuple[int, int, int, int, int, int]:
    """The arguments that every function of the op begins with: segments, rules and how many of each, layers, control."""
    segments, rules = tables.segments, tables.rules
    _check("segments", segments, 8 * segments.shape[0], torch.int64)
    _check("rules", rules, 12 * rules.shape[0])
    _check("control", control, 4)
    sizes = segments.shape[0], rules.shape[0]
    return segments.data_ptr(), sizes[0], rules.data_ptr(), sizes[1], tables.layers, control.data_ptr()


def _check(name: str, array: Tensor, elements: int, dtype: torch.dtype = torch.float64) -> None:
    """The op sees an address only: whether enough of the right kind lies behind it is known here."""
    if array.dtype != dtype or array.device.type != "cpu" or array.numel() != elements or not array.is_contiguous():
        got = f"{array.dtype} {tuple(array.shape)} on {array.device}"
        raise ValueError(f"{name}: got {got}, must be contiguous {dtype} with {elements} elements on the CPU")
