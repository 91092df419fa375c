"""Modules in fp32 in place of 16 bits, whose rounding hides small differences, as of statistics over a slice's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ds_terapipe.pipeline.slicing import as_tuple, like

_NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def in_fp32(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which copies in fp32 stand in for parameters and buffers of 16 bits, without autocast and TF32."""
    held = {id(tensors): tensors for module in modules for tensors in (module._parameters, module._buffers)}
    places = [(of_module, name, t) for of_module in held.values() for name, t in of_module.items() if _is_narrow(t)]
    copies: dict[Any, Tensor] = {}
    products = torch.get_float32_matmul_precision()
    devices = {tensor.device.type for *_, tensor in places if tensor is not None} or {"cpu"}
    try:
        for of_module, name, tensor in places:
            assert tensor is not None
            if tensor not in copies:
                copies[tensor] = _wide(tensor)
            of_module[name] = copies[tensor]  # type: ignore[assignment]
        torch.set_float32_matmul_precision("highest")
        with torch.autocast(devices.pop(), enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(products)
        for of_module, name, tensor in places:
            of_module[name] = tensor  # type: ignore[assignment]


def wide(value: Any) -> Any:
    """Return tensors with those of 16 bits in fp32, in the form of ``value``."""
    return like(value, [tensor.float() if _is_narrow(tensor) else tensor for tensor in as_tuple(value)])


def _wide(tensor: Tensor) -> Tensor:
    copy = tensor.detach().float()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, tensor.requires_grad)
        # marks, as of sequence parallelism, but no buffer for its gradient, which has its type
        vars(copy).update({name: value for name, value in vars(tensor).items() if name != "main_grad"})
    return copy


def _is_narrow(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in _NARROW
