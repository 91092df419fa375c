"""Memory of a stage while a step runs: live units, and the bytes of them and their buffers."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.slicing import Span, as_tuple
from ds_terapipe.pipeline.storages import storage_bytes
from ds_terapipe.plan.costs.memory import StageMemory
from ds_terapipe.schedule import Action, Unit


class LiveUnits:
    """Units that ran forward and not yet backward; the largest number since the step began, and of their tokens.

    It also counts all units that ran in the step: ``forward_units`` and ``backward_units``. If a place has several
    stages, each counts its own.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._live: dict[tuple[int, Unit], int] = {}
        self._lengths: dict[int, dict[int, list[int]]] = {}
        self.peak_units = self.peak_tokens = 0
        self.forward_units = self.backward_units = 0

    def forward(self, stage: int, unit: Unit, span: Span, held: bool = True) -> None:
        """Note the forward of a stage's unit; ``held``: it lives until its backward."""
        self.forward_units += 1
        self._lengths.setdefault(stage, {}).setdefault(unit.micro_batch, []).append(span.length)
        self._live[stage, unit] = span.length
        self.peak_units = max(self.peak_units, len(self._live))
        self.peak_tokens = max(self.peak_tokens, sum(self._live.values()))
        if not held:
            del self._live[stage, unit]

    def backward(self, stage: int, unit: Unit) -> None:
        """Note the backward of a unit."""
        self.backward_units += 1
        self._live.pop((stage, unit), None)

    @property
    def count(self) -> int:
        """Number of live units."""
        return len(self._live)

    def slices(self) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of the slices that ran forward in the step, by micro-batch, in order of execution.

        If there are several stages, those of the first one.
        """
        lengths = self._lengths[min(self._lengths)] if self._lengths else {}
        return tuple(tuple(lengths[micro_batch]) for micro_batch in sorted(lengths))


class Peak(ABC):
    """Meter of a place's peak memory: the most bytes beyond those at the start and those that are excluded."""

    def __init__(self) -> None:
        self._before = 0
        self._beside = self._most = 0.0

    def begin(self) -> None:
        """Start counting."""
        self._before = self.restart()
        self._beside = self._most = 0.0

    def mark(self, beside: float) -> None:
        """Exclude so many of the bytes from here on."""
        self.look()
        self._beside = beside

    def taken(self) -> float:
        """Return the peak in bytes since the start, without bytes present at the start and excluded ones."""
        self.look()
        return self._most

    def look(self) -> None:
        """Take the most bytes since the last look into account."""
        self._most = max(self._most, self.highest() - self._before - self._beside)

    @abstractmethod
    def restart(self) -> int:
        """Forget what was, and return the bytes that are there."""

    @abstractmethod
    def highest(self) -> int:
        """Return the most bytes that were there since the last call."""


class DevicePeak(Peak):
    """:class:`Peak` of a CUDA device, by the counters of PyTorch's allocator; it resets the peak counter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def restart(self) -> int:
        self.highest()
        return torch.cuda.memory_allocated(self._device)

    def highest(self) -> int:
        # like max_memory_allocated, which first builds a flat table of some hundred figures
        peak = int(torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]["peak"])
        _highest[self._device] = max(_highest.get(self._device, 0), peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


def gradients_to_come(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of gradients that the parameters do not have yet."""
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad and p.grad is None)


_highest: dict[torch.device, int] = {}  # before PyTorch's counter of the peak was reset


def highest_allocated(device: torch.device) -> int:
    """Return the peak in bytes of this process on a CUDA device."""
    return max(_highest.get(device, 0), torch.cuda.max_memory_allocated(device))


def new_memory(device: torch.device) -> StepMemory:
    """Return the memory measurement of a place on a device."""
    return StepMemory(DevicePeak(device) if device.type == "cuda" else None)


class StepMemory(Observer):
    """Measures the memory of a micro-batch's tokens on each stage of this place, during one step.

    Activations are tensors that autograd saves for a unit, in its layers and its loss, inputs of checkpoints, which DeepSpeed
    keeps by itself, and the unit's own inputs and outputs; every storage counts once, and neither parameters nor attention
    buffers do. Off, it costs nothing.

    Args:
        peak: meter of this place, if available.

    Attributes:
        taken: peak in bytes of the last watched step, without the weights' gradients at that moment; None if
            unknown.
    """

    def __init__(self, peak: Peak | None = None) -> None:
        self.on = False
        self.taken: float | None = None
        self._peak = peak
        self._largest_gradient = 0
        # of the watched step: parameters without gradients before, and bytes; ids of those with one now; hooks on all
        self._trained: list[tuple[Tensor, int]] = []
        self._there: set[int] = set()
        self._hooks: list[Any] = []
        self._watching = False
        self._tokens: dict[int, int] = {}  # by stage
        self._bytes: dict[int, dict[str, float]] = {}
        self._sums: dict[int, int] = {}  # most bytes of gradients' sums
        self._known: set[int] = set()
        self._saved_here: dict[int, int] = {}  # bytes of the storages that the present unit's forward keeps

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Measure the next step; ``parameters`` and their gradients are not counted."""
        self.on, self._tokens, self._bytes, self._sums = True, {}, {}, {}
        known = list(parameters)
        self._known = set(storage_bytes(known))
        self._largest_gradient = max((p.numel() * p.element_size() for p in known if p.requires_grad), default=0)

    def note_peak(self, parameters: Iterable[Tensor]) -> None:
        """Watch the peak of the next units, if possible, without the gradients of these parameters.

        Their presence at the peak depends on the schedule, on when they are made and on who frees them.
        """
        if self._peak is not None:
            gc.collect()  # a closed engine whose cycles are collected in the step would lower its peak
        self.taken, self._watching = None, self._peak is not None
        self._trained = [(p, p.numel() * p.element_size()) for p in parameters if p.requires_grad and p.grad is None]

    @property
    def watches(self) -> bool:
        """Whether the step is measured, or its peak."""
        return self.on or self._watching

    def step_begins(self) -> None:
        """Start watching the peak: an inspection before the step's first unit does not count."""
        if self._watching and self._peak is not None:
            self._there.clear()
            self._hooks = [p.register_post_accumulate_grad_hook(self._made) for p, _ in self._trained]
            self._peak.begin()

    def _made(self, parameter: Tensor) -> None:
        """Exclude a parameter's gradient when it is first made."""
        if id(parameter) not in self._there:
            self._there.add(id(parameter))
            self._exclude_gradients()

    def action_ends(self, action: Action) -> None:
        """Update the excluded gradients: BF16_Optimizer, for one, frees some."""
        self._exclude_gradients()

    def _exclude_gradients(self) -> None:
        if self._watching and self._peak is not None:
            there = [(parameter, size) for parameter, size in self._trained if parameter.grad is not None]
            self._there = {id(parameter) for parameter, _ in there}
            self._peak.mark(sum(size for _, size in there))

    def step_ends(self) -> None:
        """Stop watching the peak, before the optimiser."""
        if self._watching and self._peak is not None:
            self.taken = max(self._peak.taken(), 0.0)
        for hook in self._hooks:
            hook.remove()
        self._watching, self._trained, self._hooks = False, [], []

    def forward(self, stage: int, span: Span) -> AbstractContextManager[Any]:
        """Context manager around a unit's layers."""
        if self.on:
            self._tokens[stage] = self._tokens.get(stage, 0) + span.length
            self._saved_here = {}
        return self.saving()

    def saving(self) -> AbstractContextManager[Any]:
        """Context manager around more of the same unit's forward, as its loss."""
        if not self.on:
            return nullcontext()
        saved = self._saved_here

        def pack(tensor: Tensor) -> Tensor:
            saved.update(storage_bytes([tensor]))
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def kept(
        self, stage: int, unit: Iterable[Any], joined: Iterable[Any], buffers: Callable[[], Iterable[Tensor]]
    ) -> None:
        """Count what is kept of a unit after its forward.

        Args:
            stage: number of the stage.
            unit: inputs and outputs that are there until the backward.
            joined: a loss's copies of all outputs of the micro-batch, with its last unit.
            buffers: returns the attention buffers of the micro-batch.
        """
        if not self.on:
            return
        shared = self._known | set(storage_bytes(buffers()))
        kept = {key: size for key, size in (self._saved_here | storage_bytes(unit)).items() if key not in shared}
        self._add(stage, "activations", sum(kept.values()))
        self._add(stage, "losses", sum(size for key, size in storage_bytes(joined).items() if key not in kept))

    def checkpointed(self, inputs: Iterable[Any]) -> None:
        """Note tensors that a checkpoint keeps."""
        if self.on:
            self._saved_here.update(storage_bytes(each for each in inputs if isinstance(each, Tensor)))

    def message(self, stage: int, name: str, value: Any) -> None:
        """Count a message of a unit, ``received`` from the previous stage or ``sent`` to the next."""
        if self.on:
            tensors = as_tuple(value)
            count = sum(tensor.nbytes for tensor in tensors)
            self._add(stage, name, count)
            if name == "sent" and len(tensors) > 1:
                self._add(stage, "packed", count)

    def buffers(self, stage: int, keys_values: Iterable[Tensor]) -> None:
        """Count the K and V of one micro-batch; their gradients have as many elements, in fp32 or wider."""
        for tensor in keys_values if self.on else ():
            self._add(stage, "keys_values", tensor.numel() * tensor.element_size())
            self._add(stage, "key_value_gradients", tensor.numel() * max(tensor.element_size(), 4))

    @contextmanager
    def weight_gradients(self, stage: int, keeper: WeightGradients) -> Iterator[None]:
        """Context manager around weight gradients that counts the tensors which they let go."""
        before = keeper.kept_bytes if self.on else 0
        yield
        if self.on:
            self._add(stage, "weight_gradients", before - keeper.kept_bytes)

    def gradient_sums(self, stage: int, count: Callable[[], int]) -> None:
        """Note the bytes of the sums of a stage's gradients over slices, as they are now."""
        if self.on:
            self._sums[stage] = max(self._sums.get(stage, 0), count())

    def end(self) -> dict[int, StageMemory]:
        """Return the bytes per token of a micro-batch, by stage."""
        self.on = False
        return {
            stage: StageMemory(
                **{name: total / tokens for name, total in self._bytes.get(stage, {}).items()},
                largest_gradient=float(self._largest_gradient),
                gradient_sums=float(self._sums.get(stage, 0)),
            )
            for stage, tokens in self._tokens.items()
        }

    def _add(self, stage: int, name: str, count: float) -> None:
        taken = self._bytes.setdefault(stage, {})
        taken[name] = taken.get(name, 0.0) + count
