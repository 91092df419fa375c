"""Tensors that one step reads and writes, in the memory order of their parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")  # in place of a tensor that is not there
_PARAMETER, _GRADIENT, *_MOMENTS, _COPY = range(5)
_grad, _dtype, _layout = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")


class StepTensors:
    """Parameters, gradients, moments and copies of one device: temporaries stand for those in another memory order.

    Args:
        device: where they are.
        tensors: the parameters.
        positions: of these in the whole call.
        in_rows: those that are cut along dimension 0.

    Attributes:
        columns: parameters, gradients, first and second moments, copies; each by tensor, :data:`NOTHING` for none.
        types: of the columns, codes by tensor, int64 [tensors].
        active: which tensors have a gradient, bool [tensors].
    """

    def __init__(
        self, device: torch.device, tensors: Sequence[Tensor], positions: Sequence[int], in_rows: Collection[int]
    ) -> None:
        self._device, self._tensors, self._positions = device, list(tensors), positions
        self._strides = [_memory_order(tensor, i in in_rows) for i, tensor in enumerate(tensors)]
        self._scattered = [i for i, tensor in enumerate(tensors) if tensor.stride() != self._strides[i]]
        self._nothing = [NOTHING] * len(tensors)
        self.columns: list[list[Tensor]] = [self._nothing.copy() for _ in range(5)]
        self.types = [np.zeros(len(tensors), dtype=np.int64) for _ in range(5)]
        self._dtypes: list[list[torch.dtype]] = [[] for _ in range(5)]
        self.active = np.zeros(len(tensors), dtype=bool)
        self._write_back: list[tuple[Tensor, Tensor]] = []

    def refresh(self, states: Sequence[dict[str, Any]], copies: Sequence[Tensor | None] | None) -> None:
        """Set the columns for the step that begins.

        Args:
            states: the optimizer's state of each; moments are made for tensors that have a gradient for the first time.
            copies: for all tensors of the call, what receives the new values, or None.

        Raises:
            RuntimeError: for sparse gradients, or gradients or copies of another type or shape. Nothing is changed then.
        """
        self._write_back = []
        gradients = [NOTHING if gradient is None else gradient for gradient in map(_grad, self._tensors)]
        self.active = np.array([gradient is not NOTHING for gradient in gradients], dtype=bool)
        if set(map(_layout, gradients)) - {torch.strided}:
            raise RuntimeError("FusedLamb does not support sparse gradients")
        self._set(_GRADIENT, "gradient", gradients)
        self._set(_COPY, "copy", self._nothing if copies is None else self._targets(copies))
        self._set(_PARAMETER, "parameter", self._tensors)
        strides = list(map(Tensor.stride, gradients))
        if strides != self._strides:
            for i in np.flatnonzero(self.active).tolist():
                if strides[i] != self._strides[i]:
                    self._replace(_GRADIENT, i)
        for i in self._scattered:
            self._replace(_PARAMETER, i, written=True)
        for i, target in enumerate(self.columns[_COPY]):
            if target is not NOTHING and target.stride() != self._strides[i]:
                self._replace(_COPY, i, written=True)
        self._adopt_moments(states)

    def release(self) -> None:
        """Write the temporaries of a step back to the tensors that they stand for, and keep no gradient."""
        for temporary, tensor in self._write_back:
            tensor.copy_(temporary)
        self._write_back = []
        for column in (_PARAMETER, _GRADIENT, _COPY):
            self.columns[column] = self._nothing

    def _set(self, column: int, what: str, tensors: list[Tensor]) -> None:
        dtypes = list(map(_dtype, tensors))
        if dtypes != self._dtypes[column]:
            for dtype in set(dtypes) - TYPES.keys():
                raise RuntimeError(f"FusedLamb: got a {what} of {dtype}, must be float32, float16 or bfloat16")
            self._dtypes[column] = dtypes
            self.types[column] = np.array([TYPES[dtype] for dtype in dtypes], dtype=np.int64)
        self.columns[column] = tensors.copy()

    def _targets(self, copies: Sequence[Tensor | None]) -> list[Tensor]:
        given = [copies[position] for position in self._positions]
        for tensor, target in zip(self._tensors, given, strict=True):
            if target is not None and (target.shape != tensor.shape or target.device != self._device):
                raise RuntimeError(
                    f"FusedLamb: got a copy of shape {tuple(target.shape)} on {target.device}, must be like its parameter, "
                    f"{tuple(tensor.shape)} on {self._device}"
                )
        return [NOTHING if target is None else target for target in given]

    def _replace(self, column: int, index: int, written: bool = False) -> None:
        """Put a temporary in the parameter's memory order in the place of a tensor."""
        tensor = self.columns[column][index]
        temporary = self._like(index, tensor.dtype).copy_(tensor)
        self.columns[column][index] = temporary
        if written:
            self._write_back.append((temporary, tensor))

    def _like(self, index: int, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(self._tensors[index].shape, self._strides[index], dtype=dtype, device=self._device)

    def _adopt_moments(self, states: Sequence[dict[str, Any]]) -> None:
        """Make the moments of new tensors, and bring moments that were loaded or replaced into the parameter's order."""
        for column, name in zip(_MOMENTS, ("exp_avg", "exp_avg_sq"), strict=True):
            known, now = self.columns[column], [state.get(name) for state in states]
            if all(map(is_, known, now)):
                continue
            for i, (old, new) in enumerate(zip(known, now, strict=True)):
                if old is new or (new is None and not self.active[i]):
                    continue
                shape = self._tensors[i].shape
                if new is not None and new.shape != shape:
                    raise RuntimeError(
                        f"FusedLamb: got {name} of shape {tuple(new.shape)}, must be that of its parameter, {tuple(shape)}"
                    )
                if new is None:
                    states[i][name] = self._like(i, torch.float32).zero_()
                elif (new.dtype, new.device, new.stride()) != (torch.float32, self._device, self._strides[i]):
                    states[i][name] = self._like(i, torch.float32).copy_(new)
                known[i] = states[i][name]


def _memory_order(tensor: Tensor, in_rows: bool) -> tuple[int, ...]:
    """Return strides of the tensors that go with a parameter: its own if it fills its memory, else of a contiguous one.

    ``in_rows`` asks for the contiguous order, where dimension 0 is cut into sub-layers.
    """
    dense = torch.empty_like(tensor, device="meta").stride()  # equal if the elements have neither gap nor overlap
    if dense == tensor.stride() and not in_rows:
        return dense
    return torch.empty(tensor.shape, device="meta").stride()
