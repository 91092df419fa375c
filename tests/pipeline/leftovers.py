"""Which tensors something made and left behind."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

Known = dict[int, "weakref.ref[Tensor]"]


def tensors() -> Known:
    """All tensors that Python knows of, by id."""
    gc.collect()
    return {id(thing): weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), Tensor)}


def made_since(before: Known) -> list[weakref.ref[Tensor]]:
    """The tensors that were not there ``before`` and are now."""
    return [ref for key, ref in tensors().items() if before.get(key) is not ref]  # one tensor has one such reference


def kept(made: Sequence[weakref.ref[Tensor]], larger_than: int = -1, within_s: float = 10.0) -> list[str]:
    """Types and shapes of those of more numbers than ``larger_than`` that are kept.

    They get ``within_s`` seconds to go, which nothing that is kept does: a thread of gloo's lets go of a collective's tensor only
    after it has woken those that wait for the collective, and it needs the interpreter's lock for that.
    """
    deadline = time.monotonic() + within_s
    while True:
        gc.collect()
        left = [text for ref in made if (text := _describe(ref, larger_than))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _describe(ref: weakref.ref[Tensor], larger_than: int) -> str:
    """Nothing for a tensor that is gone, or is none of those asked for. (A function: no frame may keep the tensor.)"""
    tensor = ref()
    # layouts of weights, which one step leaves to the next to be overwritten, have a layout of their own
    if tensor is None or tensor.numel() <= larger_than or (larger_than >= 0 and tensor.layout != torch.strided):
        return ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
