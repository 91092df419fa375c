"""Modules on untouched memory: parameters are PyTorch's fake tensors, which have shapes, types and a size but no bytes.

Only tensors that a module's constructor makes are fake. A script's own tensors (data, random orders, objects that are
gathered) are real, so that it may read values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from ds_terapipe.commands.checking.bytes import two_moments
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.overrides import replaced
from ds_terapipe.skip_init import skipping_init

# Small tensors of numbers (linspace, arange, tensor) stay real: constructors read them.
_FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.empty_strided, torch.eye,
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
}  # fmt: skip
_REAL = ("torch.distributed.distributed_c10d", "ds_terapipe.hf.check")  # read what they make
_apply: Any = nn.Module._apply


class _Kernels:
    """Stand-in for a compiled extension of DeepSpeed's: its kernels do nothing, since there are no bytes to change."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Factories(TorchFunctionMode):
    """Has tensors of a module's constructor made without memory."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__deepcopy__:
            return _copied(*args, **kwargs)
        if func not in _FACTORIES or str(kwargs.get("device")) == "meta" or not _constructs(sys._getframe(1)):
            return func(*args, **kwargs)
        with self._mode:
            return func(*args, **{**kwargs, "device": "cpu"})


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """``Tensor.__deepcopy__`` by an operator: PyTorch's copies bytes of the storage."""
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if parameter else copied
        if not parameter and tensor.is_leaf:
            copied.requires_grad_(tensor.requires_grad)
    found: Tensor = memo[id(tensor)]
    return found


def _constructs(frame: FrameType | None) -> bool:
    """Whether a tensor belongs to the constructor of a layer whose callers do not read values.

    Args:
        frame: innermost frame of the call that makes the tensor.
    """
    found: bool | None = None
    while frame is not None:
        if frame.f_globals.get("__name__") in _REAL:
            return False
        code = frame.f_code
        if found is None and code.co_name == "__init__" and code.co_argcount:
            built = frame.f_locals.get(code.co_varnames[0])
            if isinstance(built, nn.Module):
                found = not isinstance(built, (PipelineModule, DeepSpeedEngine))
        frame = frame.f_back
    return bool(found)


def _applied(module: nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` for parameters without bytes, which PyTorch would swap and cannot."""
    if recurse:
        for child in module.children():
            child._apply(fn)
    kept = module._parameters
    rest: dict[str, Any] = {}
    for name, parameter in kept.items():
        on_meta = parameter is not None and parameter.device.type == "meta"
        if parameter is None or not (on_meta or isinstance(parameter, FakeTensor)):
            rest[name] = parameter
            continue
        with torch.no_grad():
            changed = fn(parameter)
        if changed is not parameter and on_meta:
            kept[name] = nn.Parameter(changed, parameter.requires_grad)
        elif changed is not parameter:
            parameter.data = changed
    with replaced(module, _parameters=rest):
        _apply(module, fn, recurse=False)
        kept.update(rest)
    return module


@contextmanager
def untouched() -> Iterator[FakeTensorMode]:
    """Context manager in which modules are built without memory, weights are neither drawn nor read, kernels do nothing.

    Yields the mode of the fake tensors: tensors made in it are fake, too.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _applied))
        stack.enter_context(mock.patch.object(OpBuilder, "load", lambda self, verbose=True: _Kernels()))
        stack.enter_context(mock.patch.object(FusedLamb, "step", two_moments))
        stack.enter_context(skipping_init())
        stack.enter_context(_Factories(mode))
        yield mode
