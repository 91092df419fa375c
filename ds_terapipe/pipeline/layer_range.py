"""Layers of a stage, run in order as DeepSpeed's ``PipelineModule`` runs its own.

``PipelineModule.forward`` (runtime/pipe/module.py, 0.19.8) runs all layers of a process. A stage may be a part of them,
and attention must know its layer, in a recomputation too. Therefore this class has its own loop, with the module's
settings.
"""

from __future__ import annotations

import dis
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.refusals import has_own_forward

Layer = Callable[[Any], Any]


class _Received(Exception):
    """Inputs that have come as far as the first layer."""


class LayerRange:
    """Layers ``[first, first + len(functions))`` of a model.

    Args:
        functions: the layers: modules, or functions of their inputs.
        first: number of the first one in the model.
        entering: called with the number of each layer before it runs, in every recomputation too.
        leaving: called when a layer ends, after an error too.
        module: the layers' ``PipelineModule``, for its checkpoint and seed settings; None: there is none.

    ``functions`` may be replaced between steps by equivalent ones (to time them).
    """

    def __init__(
        self,
        functions: Sequence[Layer],
        first: int,
        entering: Callable[[int], None],
        leaving: Callable[[], None],
        module: Any = None,
    ) -> None:
        self.functions, self.first = list(functions), first
        self._names = [_name_of(layer) for layer in functions]
        self._modules = [list(modules_of(layer)) for layer in functions]
        self.modules = list(chain.from_iterable(self._modules))
        self._layer_of: dict[int, int] = {}
        self._entering, self._leaving, self._module = entering, leaving, module
        # DeepSpeed counts the layers of a process; with several stages on a place, those of each
        self._start = 0 if module is None else next(each for each in ModelChunks(module).ranges if first in each).start
        self._before = 0 if module is None else first - self._start
        self._runs = 0 if module is None else module.micro_offset
        self._checkpointed: tuple[int, list[bool]] = (0, [])
        self.keeping: Callable[[Sequence[Any]], None] = lambda inputs: None  # called with what a checkpoint keeps
        self.timed = True  # whether these layers are timed in a step that times layers

    def __call__(self, inputs: Any, start: int = 0) -> Any:
        """Run the layers from index ``start`` on; tensors between layers are one tensor or a tuple of them."""
        module = self._module
        if module is None:
            return self._run(start, len(self.functions), 0, 0)(inputs)
        if has_own_forward(module):
            return module(inputs)  # never cut: refusals/ makes sure of that
        return self._as_module(functools.partial(self._forward, first=start), inputs)

    def received(self, inputs: Any) -> Any:
        """Return what the first layer gets of these inputs: hooks that run before the module may change them."""
        got = [inputs]

        def stop(value: Any) -> Any:
            got.append(value)
            raise _Received  # hooks that run after it expect its outputs

        if self._module is not None and not has_own_forward(self._module):
            with suppress(_Received):
                self._as_module(stop, inputs)
        return got[-1]

    def _as_module(self, forward: Callable[[Any], Any], inputs: Any) -> Any:
        """Call the module with another ``forward``: its hooks run (DeepSpeed's cast inputs and time the forward)."""
        own = self._module.__dict__
        own["forward"] = forward
        try:
            return self._module(inputs)
        finally:
            del own["forward"]

    def text(self, number: int) -> str:
        """Return a layer's name for errors, by its number in the model: ``layer 3 (Block)``."""
        index = number - self.first
        return f"layer {number} ({self._names[index]})" if 0 <= index < len(self._names) else f"layer {number}"

    @property
    def last(self) -> str:
        """Name of the last layer for errors."""
        return self.text(self.first + len(self.functions) - 1)

    def layer_of(self, parameter: Tensor) -> int:
        """Return the index of the first layer with a parameter; 0 for one that is in no module of theirs."""
        if id(parameter) not in self._layer_of:
            found = (
                (id(known), index)
                for index, layer in reversed(list(enumerate(self._modules)))
                for module in layer
                for known in module.parameters()
            )
            self._layer_of = {id(parameter): 0, **dict(found)}
        return self._layer_of[id(parameter)]

    def _forward(self, inputs: Any, first: int = 0) -> Any:
        module = self._module
        # its own count: DeepSpeed counts one forward pass, here each stage of the process has one
        self._runs += 1
        module.micro_offset, offset = self._runs, self._runs + 1
        interval = self.checkpoint_interval
        if not interval:
            return self._run(first, len(self.functions), offset, 0)(inputs)
        for (start, stop), checkpointed in zip(self._ranges(interval), self._checkpoints(interval), strict=True):
            if stop <= first:
                continue
            run = self._run(max(start, first), stop, offset, interval)
            several = inputs if isinstance(inputs, tuple) else (inputs,)
            again = checkpointed and torch.is_grad_enabled()  # without gradients nothing is recomputed
            if again:
                self.keeping(several)
            inputs = module.activation_checkpoint_func(run, *several) if again else run(*several)
        return inputs

    def _ranges(self, interval: int) -> list[tuple[int, int]]:
        """Return the ranges of layers checkpointed together: DeepSpeed's of this process, clipped to these layers."""
        count = len(self.functions)
        starts = [0, *range(interval - self._before % interval, count, interval)]
        return list(zip(starts, [*starts[1:], count], strict=True))

    def _run(self, start: int, stop: int, offset: int, interval: int) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            value: Any = inputs[0] if len(inputs) == 1 else inputs
            for index in range(start, stop):
                if self._module is not None:
                    # DeepSpeed counts from the first layer again in every checkpointed range; its seeds depend on that
                    local = self._before + index
                    self._module.curr_layer = self._start + (local % interval if interval else local)
                    if self._module.seed_layers:
                        self._seed(self._module.base_seed * offset + self._module.curr_layer)
                self._entering(self.first + index)  # the hook may seed, too, by more than DeepSpeed knows
                try:
                    value = self.functions[index](value)
                finally:  # a recomputation may stop early, when all needed tensors exist
                    self._leaving()
            return value

        return run

    def _seed(self, seed: int) -> None:
        (self._module.seed_fn or seed_generators)(seed)

    @property
    def checkpoint_interval(self) -> int:
        """Layers per activation checkpoint; 0: none."""
        return 0 if self._module is None else int(self._module.activation_checkpoint_interval)

    @property
    def is_reentrant(self) -> bool:
        """Whether layers are checkpointed by a function that needs an input with ``requires_grad``."""
        return self.checkpoint_interval > 0 and _needs_gradient(self._module.activation_checkpoint_func)

    def detaches(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the first checkpoint trains nothing: reentrant, with weights, and inputs without
        ``requires_grad``."""
        if not self.is_reentrant or not self._checkpoints(self.checkpoint_interval)[0]:
            return False
        first = self.functions[: self._ranges(self.checkpoint_interval)[0][1]]
        learns = any(p.requires_grad for f in first if isinstance(f, nn.Module) for p in f.parameters())
        return learns and not any(tensor.is_floating_point() for tensor in inputs)

    def _checkpoints(self, interval: int) -> list[bool]:
        """Return for each range of layers whether it is checkpointed."""
        if self._checkpointed[0] != interval:
            ranges = [self.functions[start:stop] for start, stop in self._ranges(interval)]
            self._checkpointed = interval, [bool(self._module._is_checkpointable(each)) for each in ranges]
        return self._checkpointed[1]


@functools.cache
def _needs_gradient(checkpoint: Callable[..., Any]) -> bool:
    """Whether weights get a gradient by a function that checkpoints only if an input does; the user's is tried."""
    if checkpoint in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        return bool(checkpoint is checkpointing.checkpoint)
    weight = torch.ones(1, requires_grad=True)
    try:
        with torch.enable_grad():
            return not checkpoint(lambda inputs: inputs * weight, torch.ones(1)).requires_grad
    except Exception:  # it expects more of what it runs
        return True


def modules_of(layer: Any) -> Iterator[nn.Module]:
    """Yield the modules of a layer: itself, or those that a function or another object of it computes with."""
    parts = (layer.func, *layer.args, *layer.keywords.values()) if isinstance(layer, functools.partial) else (layer,)
    for held in chain.from_iterable(map(held_by, parts)):
        if isinstance(held, nn.Module) and not isinstance(held, (PipelineModule, DeepSpeedEngine)):
            yield held


def held_by(part: Any) -> Sequence[Any]:
    """Return a method's object, a function's closure, defaults and global names, and another object's attributes."""
    owner, function = getattr(part, "__self__", part), getattr(part, "__func__", part)
    if isinstance(owner, nn.Module):
        return (owner,)
    held = list(getattr(owner, "__dict__", {}).values())
    if isinstance(function, FunctionType):
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # an empty one has no contents
        names = map(function.__globals__.get, _global_names(function.__code__))
        held += [*(cell.cell_contents for cell in cells), *(function.__defaults__ or ()), *names]
    return held


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    # not `co_names`, which has those of attributes too
    return tuple(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")


def _name_of(layer: Any) -> str:
    """Return the class name of a module, or of a function's module, or the function's name."""
    for module in modules_of(layer):
        return type(module).__name__
    return getattr(layer, "__name__", type(layer).__name__)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, as DeepSpeed's ``set_random_seed`` before a layer.

    ``torch.manual_seed``, as called there, formats the stack for each unused kind of device, over a millisecond in all.
    That is longer than a slice of a small layer.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().manual_seed_all(seed % 2**63)
