"""Tensors of a boundary: their types and shapes, how shapes follow the tokens, and their form as one message."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.slicing import Span, TensorCut, as_tuple

_ANNOUNCED = 4096  # bytes
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_AS_BYTES = (torch.bool, torch.int16, torch.complex64, torch.complex128)  # NCCL has no such types
_ALIGNMENT = 256  # bytes; that of the CUDA allocator, which kernels rely on


class TensorSpec(NamedTuple):
    """A tensor of a boundary; ``needs_grad``: its gradient travels back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    @property
    def bytes(self) -> int:
        """Size of the tensor's elements together."""
        return prod(self.shape) * self.dtype.itemsize

    def at(self, cut: TensorCut, span: Span) -> TensorSpec:
        """Return the spec for another slice."""
        shape = list(self.shape)
        if cut.row is not None:
            shape[cut.row] = cut.rows(span)
        if cut.column is not None:
            shape[cut.column] = span.stop
        return self._replace(shape=tuple(shape))


class BoundarySpec(NamedTuple):
    """Types and shapes of a stage's output for one unit: one tensor or a tuple of them."""

    tensors: tuple[TensorSpec, ...]
    single: bool

    @classmethod
    def of(cls, outputs: Tensor | Sequence[Tensor]) -> BoundarySpec:
        """Describe a stage's outputs, which `check_sendable` accepts."""
        single, tensors = isinstance(outputs, Tensor), as_tuple(outputs)
        return cls(tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors), single)

    def gradients(self) -> BoundarySpec:
        """Return the spec of the gradients that come back for it."""
        return BoundarySpec(tuple(spec for spec in self.tensors if spec.needs_grad), self.single)

    def at(self, cuts: Sequence[TensorCut], span: Span) -> BoundarySpec:
        """Return the spec for another slice: dimensions that follow the tokens have its sizes."""
        return self._replace(tensors=tuple(spec.at(cut, span) for spec, cut in zip(self.tensors, cuts, strict=True)))

    def encode(self) -> Tensor:
        """Encode as bytes, uint8 [4096]."""
        data = pickle.dumps(self)
        if len(data) > _ANNOUNCED:
            count = f"{len(self.tensors)} tensors: their shapes"
            raise ValueError(f"a stage hands on {count} take {len(data)} bytes, at most {_ANNOUNCED}")
        return torch.frombuffer(bytearray(data.ljust(_ANNOUNCED)), dtype=torch.uint8)

    @classmethod
    def decode(cls, announcement: Tensor) -> BoundarySpec:
        """Decode the result of :meth:`encode`."""
        return cast(BoundarySpec, pickle.loads(announcement.numpy().tobytes()))


def new_announcement() -> Tensor:
    """Return memory for the result of :meth:`BoundarySpec.encode`."""
    return torch.empty(_ANNOUNCED, dtype=torch.uint8)


def check_sendable(outputs: Any, layer: str) -> None:
    """Check that a stage's outputs can be sent.

    Args:
        outputs: of the stage's last layer.
        layer: name of that layer in errors.

    Raises:
        ConfigError: an entry is no tensor, or of a type that cannot be sent.
    """
    entries = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    for index, entry in enumerate(entries):
        if isinstance(entry, Tensor) and entry.dtype in _DTYPES:
            continue
        got = str(entry.dtype) if isinstance(entry, Tensor) else type(entry).__name__
        where = f" as entry {index}" if entries is outputs else ""
        raise ConfigError(
            f"{layer}: got outputs with {got}{where}, must be a tensor or a tuple of tensors where a stage ends, use a tensor "
            "there or another partition_method"
        )


def raw(tensor: Tensor) -> Tensor:
    """Return the tensor in the form of a message: on the same memory if it is contiguous and resolved."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _AS_BYTES else tensor


def new_message(spec: BoundarySpec, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return an empty message and the tensors that it fills: on its memory, each with a version counter of its own.

    One tensor is a message of its own type. Several lie in bytes one behind the other, each at a multiple of 256.
    """
    if len(spec.tensors) == 1:
        (only,) = spec.tensors
        tensor = torch.empty(only.shape, dtype=only.dtype, device=device)
        return raw(tensor), [tensor]
    starts = _starts(spec)
    message = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    tensors = []
    for each, start in zip(spec.tensors, starts, strict=False):
        tensor = torch.empty(0, dtype=each.dtype, device=device)
        tensor.set_(message.untyped_storage(), start // each.dtype.itemsize, each.shape)  # type: ignore[call-overload]
        tensors.append(tensor)
    return message, tensors


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one message: a single one on its own memory if that is contiguous, several as a copy."""
    if len(tensors) == 1:
        return raw(tensors[0])
    spec = BoundarySpec.of(tensors)
    message, places = new_message(spec, tensors[0].device)
    with torch.no_grad():
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
    return message


def _starts(spec: BoundarySpec) -> list[int]:
    """Offsets of a message's tensors in bytes, and the size of the message."""
    sizes = [-(-each.bytes // _ALIGNMENT) * _ALIGNMENT for each in spec.tensors]
    return [0, *accumulate(sizes)]
