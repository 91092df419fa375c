"""Tensors that one step reads and writes, in the memory order of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.optim.op import segments

NOTHING = torch.empty(0)  # in place of a tensor that is not there
_GRADIENT, _DTYPE, _LAYOUT = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")


class StepTensors:
    """Parameters, gradients, moments and copies of one device: temporaries stand for those in another memory order.

    Args:
        device: where they are.
        tensors: the parameters.
        positions: of these in the whole call.
        strides: memory order in which the op reads each.

    Attributes:
        active: which have a gradient, bool [tensors].
        moments: first and second ones, by tensor.
        types, sizes: codes of data types, and bytes of an element, by column of the segments' table.
    """

    def __init__(
        self,
        device: torch.device,
        tensors: Sequence[Tensor],
        positions: Sequence[int],
        strides: Sequence[tuple[int, ...]],
    ) -> None:
        self._device, self._tensors, self._positions, self._strides = device, tensors, positions, list(strides)
        self._scattered = [i for i, (t, s) in enumerate(zip(tensors, strides, strict=True)) if t.stride() != s]
        self.types = {segments.PARAMETER_TYPE: _types(tensors)}
        four = np.full(len(tensors), 4, dtype=np.int64)
        self.sizes = {segments.PARAMETER: _sizes(tensors), segments.EXP_AVG: four, segments.EXP_AVG_SQ: four}
        self.moments: list[list[Tensor]] = [[NOTHING] * len(tensors) for _ in range(2)]
        self.active = np.zeros(len(tensors), dtype=bool)
        self._no_copies = [NOTHING] * len(tensors)
        self._write_back: list[tuple[Tensor, Tensor]] = []

    def refresh(
        self, states: Sequence[dict[str, Any]], copies: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor], ...]:
        """Return parameters, gradients, both moments and copies of the step that begins.

        Args:
            states: the optimizer's state of each; moments are made for tensors that have a gradient for the first time.
            copies: for all tensors of the call, what receives the new values, or None.

        Raises:
            RuntimeError: for sparse gradients, or gradients or copies of another type or shape. Nothing is changed then.
        """
        self._write_back = []
        gradients = self._gradients()
        targets = self._copies(copies)
        parameters = self._parameters()
        self._adopt_moments(states)
        return parameters, gradients, *self.moments, targets

    def write_back(self) -> None:
        """Write the temporaries of a step back to the tensors that they stand for."""
        for temporary, tensor in self._write_back:
            tensor.copy_(temporary)
        self._write_back = []

    def _gradients(self) -> list[Tensor]:
        gradients = list(map(_GRADIENT, self._tensors))
        self.active = np.array([gradient is not None for gradient in gradients], dtype=bool)
        if not self.active.all():
            gradients = [NOTHING if gradient is None else gradient for gradient in gradients]
        if set(map(_LAYOUT, gradients)) - {torch.strided}:
            raise RuntimeError("FusedLamb does not support sparse gradients")
        strides = list(map(Tensor.stride, gradients))
        self._note_types(segments.GRADIENT, segments.GRADIENT_TYPE, gradients, "gradient")
        if strides != self._strides:
            for i in np.flatnonzero(self.active).tolist():
                if strides[i] != self._strides[i]:
                    gradients[i] = self._like(i, gradients[i].dtype).copy_(gradients[i])
        return gradients

    def _note_types(self, column: int, shift: int, tensors: Sequence[Tensor], what: str) -> None:
        dtypes = list(map(_DTYPE, tensors))
        if dtypes == getattr(self, f"_{what}_dtypes", None):
            return
        for dtype in set(dtypes):
            if dtype not in segments.TYPES:
                raise RuntimeError(f"FusedLamb: got a {what} of {dtype}, must be float32, float16 or bfloat16")
        setattr(self, f"_{what}_dtypes", dtypes)
        self.types[shift] = _types(tensors)
        self.sizes[column] = _sizes(tensors)

    def _copies(self, copies: Sequence[Tensor | None] | None) -> list[Tensor]:
        if copies is None:
            self._note_types(segments.COPY, segments.COPY_TYPE, self._no_copies, "copy")
            return self._no_copies
        given = [copies[position] for position in self._positions]
        targets = [NOTHING if copy is None else copy for copy in given]
        for i, target in enumerate(targets):
            if target is NOTHING:
                continue
            if target.shape != self._tensors[i].shape or target.device != self._device:
                raise RuntimeError(
                    f"FusedLamb: got a copy of shape {tuple(target.shape)} on {target.device}, must be like its parameter, "
                    f"{tuple(self._tensors[i].shape)} on {self._device}"
                )
        self._note_types(segments.COPY, segments.COPY_TYPE, targets, "copy")
        for i, target in enumerate(targets):
            if target is not NOTHING and target.stride() != self._strides[i]:
                targets[i] = self._like(i, target.dtype).copy_(target)
                self._write_back.append((targets[i], target))
        return targets

    def _parameters(self) -> list[Tensor]:
        parameters = list(self._tensors)
        for i in self._scattered:
            parameters[i] = self._like(i, parameters[i].dtype).copy_(parameters[i])
            self._write_back.append((parameters[i], self._tensors[i]))
        return parameters

    def _like(self, index: int, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(self._tensors[index].shape, self._strides[index], dtype=dtype, device=self._device)

    def _adopt_moments(self, states: Sequence[dict[str, Any]]) -> None:
        """Make the moments of new tensors, and bring moments that were loaded or replaced into the parameter's order."""
        for known, name in zip(self.moments, ("exp_avg", "exp_avg_sq"), strict=True):
            now = [state.get(name) for state in states]
            if all(map(is_, known, now)):
                continue
            for i, (old, new) in enumerate(zip(known, now, strict=True)):
                if old is new or (new is None and not self.active[i]):
                    continue
                fits = new is not None and new.dtype == torch.float32 and new.device == self._device
                if not fits or new is None or new.shape != self._tensors[i].shape or new.stride() != self._strides[i]:
                    new = self._moment(i, name, new)
                    states[i][name] = new
                known[i] = new

    def _moment(self, index: int, name: str, given: Tensor | None) -> Tensor:
        made = self._like(index, torch.float32)
        if given is None:
            return made.zero_()
        if given.shape != made.shape:
            raise RuntimeError(
                f"FusedLamb: got {name} of shape {tuple(given.shape)}, must be that of its parameter, {tuple(made.shape)}"
            )
        return made.copy_(given)


def addresses_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """Return the addresses of tensors, 0 for :data:`NOTHING`, int64 [tensors]."""
    if tensors and tensors[0] is tensors[-1] is NOTHING and all(tensor is NOTHING for tensor in tensors):
        return np.zeros(len(tensors), dtype=np.int64)
    return np.fromiter(map(Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))


def _types(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.array([segments.TYPES[tensor.dtype] for tensor in tensors], dtype=np.int64)


def _sizes(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.array([tensor.element_size() for tensor in tensors], dtype=np.int64)
