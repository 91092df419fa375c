"""What the single layers of this stage take, timed during steps that run uncut.

For such a step the functions that a stage calls in turn are wrapped: a layer's forward ends when its output is
there, and its backward begins when the gradient of that output is. So the times of a stage's layers add up to those of its
actions, and a step that is not timed runs nothing of this. Uncut, for then a backward makes the weight gradients as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_terapipe.pipeline.layer_range import LayerRange
from ds_terapipe.pipeline.trace import Execute, new_clock
from ds_terapipe.schedule import Action, Op

_STEPS = 2  # the latest that count
_QUANTILE = 0.25  # of the repeats: noise only ever adds


class _Timed(NamedTuple):
    """An action with marks of the clock: at its begin, per layer (forward: after it, backward: before it), and at its end."""

    op: Op
    begin: Any
    layers: Sequence[tuple[int, Any]]
    end: Any


class LayerTimes:
    """Times the layers of a stage.

    Args:
        layers: of the place's stages, whose ``functions`` are replaced during a step that is timed. Several stages on one place
            are not timed, nor layers that are checkpointed: there a layer's forward runs twice, in parts that overlap.
        device: where it computes.
    """

    def __init__(self, layers: Sequence[LayerRange], device: torch.device) -> None:
        self._stages, self._layers, self._clock = len(layers), layers[0], new_clock(device)
        self._steps: deque[list[_Timed]] = deque(maxlen=_STEPS)
        self._actions: list[_Timed] | None = None  # of the step that is being timed
        self._marks: list[tuple[int, Any]] = []

    @contextmanager
    def step(self, wanted: bool) -> Iterator[None]:
        """Time the step that runs inside, where it is ``wanted``."""
        if not wanted or self._stages > 1 or self._layers.checkpoint_interval:
            yield
            return
        layers = self._layers.functions
        self._layers.functions = [partial(self._run, index, layer) for index, layer in enumerate(layers)]
        self._actions = []
        try:
            yield
            self._steps.append(self._actions)
        finally:
            self._layers.functions, self._actions = layers, None

    def recording(self, execute: Execute) -> Execute:
        """``execute`` itself, or where this step is timed a function that times it."""
        actions = self._actions
        if actions is None:
            return execute

        def timed(action: Action) -> None:
            self._marks, begin = [], self._clock.now()
            execute(action)
            if action.op in (Op.FORWARD, Op.BACKWARD):
                actions.append(_Timed(action.op, begin, self._marks, self._clock.now()))

        return timed

    def seconds(self) -> tuple[float, ...] | None:
        """Forward and backward of each layer over one micro-batch in the steps since the last call; the loss is in the last
        layer. None where nothing was timed, or layers do not run one after the other."""
        actions = [action for step in self._steps for action in step]
        self._steps.clear()
        count = len(self._layers.functions)
        forward = [self._forward(each, count) for each in actions if each.op is Op.FORWARD]
        backward = [self._backward(each, count) for each in actions if each.op is Op.BACKWARD]
        if not forward or not backward or None in forward or None in backward:
            return None
        both = np.quantile(forward, _QUANTILE, axis=0) + np.quantile(backward, _QUANTILE, axis=0)
        return tuple(both.tolist())

    def _run(self, index: int, layer: Callable[[Any], Any], inputs: Any) -> Any:
        outputs = layer(inputs)
        marks = self._marks
        marks.append((index, self._clock.now()))
        given = {id(tensor) for tensor in _tensors(inputs)}  # what a layer hands on is no work of its own
        made = next((each for each in _tensors(outputs) if each.requires_grad and id(each) not in given), None)
        if made is not None:
            made.register_hook(lambda gradient: self._marks.append((index, self._clock.now())))
        return outputs

    def _forward(self, timed: _Timed, count: int) -> list[float] | None:
        if [index for index, _ in timed.layers] != list(range(count)):
            return None
        ends = [*(mark for _, mark in timed.layers[:-1]), timed.end]
        return [self._clock.seconds(end, begin) for begin, end in zip([timed.begin, *ends], ends, strict=False)]

    def _backward(self, timed: _Timed, count: int) -> list[float] | None:
        """What comes before the last layer is the loss, which counts with it; layers that get no gradient take nothing."""
        order = [index for index, _ in timed.layers]
        if not order or order != sorted(set(order), reverse=True):
            return None
        begins = [timed.begin, *(mark for _, mark in timed.layers[1:])]
        seconds = [0.0] * count
        for index, begin, end in zip(order, begins, [*begins[1:], timed.end], strict=True):
            seconds[index] = self._clock.seconds(end, begin)
        return seconds


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(each, Tensor)]
