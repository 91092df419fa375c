"""Times of this place's single layers, taken during steps.

In a timed step the functions that a stage calls in turn are wrapped. A layer's forward ends when its output exists; its
backward begins when the gradient of that output exists. So the times of a stage's layers add up to those of its
actions. A step that is not timed runs none of this. Deferred weight gradients, in a step that is cut, cannot be told
apart by layer: they are spread over the layers of their stage in proportion to its backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ds_terapipe.overrides import replaced
from ds_terapipe.pipeline.clock import Clock
from ds_terapipe.pipeline.layer_range import LayerRange
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.slicing import tensors_in
from ds_terapipe.schedule import Action, Op

_STEPS = 2  # number of steps that count
_QUANTILE = 0.25  # quantile of the repeats: noise only adds time

Costs: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
"""Forward and backward seconds of each layer."""
_Seconds: TypeAlias = NDArray[np.float64]


class _Timed(NamedTuple):
    """An action with marks of the clock: at its begin, per layer (forward: after it, backward: before it), and at its end."""

    action: Action
    begin: Any
    layers: Sequence[tuple[int, Any]]
    end: Any


class LayerTimes(Observer):
    """Times the layers of a place.

    Args:
        layers: layers of the stages, in model order; ``functions`` are replaced in a timed step. Checkpointed layers
            are not timed: their forward runs twice, in parts that overlap.
        device: device of the layers.
    """

    def __init__(self, layers: Sequence[LayerRange], device: torch.device) -> None:
        self._stages, self._clock = list(layers), Clock(device)
        self._starts = [0, *accumulate(len(each.functions) for each in layers)]
        self._steps: deque[list[_Timed]] = deque(maxlen=_STEPS)
        self._actions: list[_Timed] | None = None  # actions of the timed step
        self._begun: Any = None  # mark at the begin of the action
        self._marks: list[tuple[int, Any]] = []
        self._known: Costs | None = None

    @contextmanager
    def step(self, wanted: bool) -> Iterator[None]:
        """Context manager that times a step if it is ``wanted``."""
        if not wanted or any(stage.checkpoint_interval for stage in self._stages):
            yield
            return
        actions: list[_Timed] = []
        with ExitStack() as timed:
            for stage, start in zip(self._stages, self._starts, strict=False):
                if stage.timed:
                    runs = [partial(self._run, index, layer) for index, layer in enumerate(stage.functions, start)]
                    timed.enter_context(replaced(stage, functions=runs))
            timed.enter_context(replaced(self, _actions=actions))
            yield
            self._steps.append(actions)

    @property
    def watches(self) -> bool:
        """Whether the step is timed."""
        return self._actions is not None

    def action_begins(self, index: int, action: Action) -> None:
        """Mark the begin of an action."""
        self._marks, self._begun = [], self._clock.now()

    def action_ends(self, action: Action) -> None:
        """Record the layers' marks of an action."""
        if action.op.is_compute and self._actions is not None:
            self._actions.append(_Timed(action, self._begun, self._marks, self._clock.now()))

    def seconds(self) -> tuple[float, ...] | None:
        """Return forward plus backward seconds of each layer per micro-batch in the steps since the last call.

        The last layer includes the loss. None if no step was timed, or layers did not run in order.
        """
        costs = self.costs() if self._steps else None
        self._steps.clear()
        return None if costs is None else tuple(map(sum, zip(*costs, strict=True)))

    def costs(self) -> Costs | None:
        """Return forward and backward seconds of each layer in the last timed steps, separately; may be called again.

        The backward of a forward-only layer is 0.
        """
        if self._steps:
            self._known = self._measured()
        return self._known

    def _measured(self) -> Costs | None:
        passes: dict[tuple[Op, int], list[_Seconds]] = defaultdict(list)
        for step in self._steps:
            found = self._passes(step)
            if found is None:
                return None
            for (op, number, _), seconds in found.items():
                passes[op, number].append(seconds)
        taken = {key: np.quantile(repeats, _QUANTILE, axis=0) for key, repeats in passes.items()}
        forward: list[float] = []
        backward: list[float] = []
        for number, stage in enumerate(self._stages):
            none = np.zeros(len(stage.functions))
            if stage.timed and (Op.FORWARD, number) not in taken:
                return None
            forward += taken.get((Op.FORWARD, number), none).tolist()
            back = taken.get((Op.BACKWARD, number), none)
            apart = float(taken.get((Op.WEIGHT_GRADIENTS, number), np.zeros(1))[0])
            backward += (back * (1 + apart / max(float(back.sum()), 1e-12))).tolist()
        return tuple(forward), tuple(backward)

    def _passes(self, step: Sequence[_Timed]) -> dict[tuple[Op, int, int], _Seconds] | None:
        """Return the seconds of each layer, by operation, stage of this place and micro-batch, summed over slices.

        Weight gradients are one sum. None if layers did not run in order.
        """
        found: dict[tuple[Op, int, int], _Seconds] = {}
        numbers: dict[int, int] = {}  # a stage's index on this place, by its number in the model
        for timed in step:
            op, stage, unit, _ = timed.action
            if op is Op.FORWARD and timed.layers:
                numbers.setdefault(stage, int(np.searchsorted(self._starts, timed.layers[0][0], side="right")) - 1)
            number = numbers.get(stage)
            if number is None:
                continue  # a stage that is not timed
            whole = [self._clock.seconds(timed.end, timed.begin)]
            seconds = whole if op is Op.WEIGHT_GRADIENTS else self._layers(timed, number)
            if seconds is None:
                return None
            key = op, number, unit.micro_batch
            found[key] = found.get(key, np.zeros(len(seconds))) + np.array(seconds)
        return found

    def _run(self, index: int, layer: Callable[[Any], Any], inputs: Any) -> Any:
        outputs = layer(inputs)
        marks = self._marks
        marks.append((index, self._clock.now()))
        given = {id(tensor) for tensor in tensors_in(inputs)}  # an input that a layer passes on is no work of its own
        made = next((each for each in tensors_in(outputs) if each.requires_grad and id(each) not in given), None)
        if made is not None:
            made.register_hook(lambda gradient: self._marks.append((index, self._clock.now())))
        return outputs

    def _layers(self, timed: _Timed, number: int) -> list[float] | None:
        """Return the seconds of a stage's layers in an action; None if the order of the marks is unexpected.

        The last layer includes the loss. Layers without a gradient take 0.
        """
        forward, order = timed.action.op is Op.FORWARD, [index for index, _ in timed.layers]
        first, stop = self._starts[number : number + 2]
        backward_order = [index for index in reversed(range(first, stop)) if index in order]
        if not order or order != (list(range(first, stop)) if forward else backward_order):
            return None
        between = timed.layers[:-1] if forward else timed.layers[1:]
        seconds = [0.0] * (stop - first)
        for index, (begin, end) in zip(
            order, pairwise([timed.begin, *(m for _, m in between), timed.end]), strict=True
        ):
            seconds[index - first] = self._clock.seconds(end, begin)
        return seconds
