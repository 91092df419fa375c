"""One stage of the model: everything that depends on its layers.

A place of a pipeline runs one stage or several. Each has its own slice context, so keys and values are identified by
(stage, micro-batch). It also has its own weight gradients, and results of actions for later ones, by unit. It neither
sends nor receives: ``runtime.py`` passes its inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.inspection.sequence_dims import SequenceDims
from ds_terapipe.pipeline.layer_range import Layer, LayerRange
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.operators.gradient_sums import summed
from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.recording.accounting import StepMemory
from ds_terapipe.pipeline.slicing import aliases, as_tuple
from ds_terapipe.schedule import ALL, Group, Unit

Autocast: TypeAlias = Callable[[], AbstractContextManager[Any]]


class GradientRules(Protocol):
    """Hooks around backward passes that are parts of one."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss of a micro-batch, or a slice's share, scaled for its backward pass."""

    def around(
        self, parameters: Iterable[nn.Parameter], first: bool = True, last: bool = True
    ) -> AbstractContextManager[None]:
        """Context manager around a backward pass of a stage with these parameters; ``first``, ``last``: of its micro-batch."""

    def summed_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of the sums of these parameters' gradients that are not in ``grad``."""


class Stage:
    """Runs its layers forward and backward, unit by unit.

    Args:
        number: number of the stage in the placement.
        functions: its layers.
        first_layer: the first one's number in the model.
        module: the ``PipelineModule`` of the layers, if there is one; see `LayerRange`.
        trains: False for a forward-only stage.
        gradients: hooks around backward passes.
        memory: measures the memory of units, on request.
        autocast: context of the layers' mixed precision.
        streams: seeds the layers' random numbers in training; None: the process's own state.
    """

    def __init__(
        self,
        number: int,
        functions: Sequence[Layer],
        first_layer: int,
        *,
        module: Any = None,
        trains: bool = True,
        gradients: GradientRules,
        memory: StepMemory | None = None,
        autocast: Autocast = nullcontext,
        streams: RandomStreams | None = None,
    ) -> None:
        self.number, self.trains = number, trains
        self.context = context = SliceContext()
        self.layers = LayerRange(functions, first_layer, context.enter_layer, context.leave_layer, module)
        context.streams, context.layer_text = streams, self.layers.text
        self.root = module if module is not None else nn.ModuleList(self.layers.modules)
        # by whether the module trains: some layers compute something else then
        self._dims: dict[bool, SequenceDims] = {}
        self.written: list[str] = []  # statistics that its layers write in every slice, as the inspection has found
        self.weight_gradients = WeightGradients()
        self.losses: StepLosses | None = None  # losses of the step, on the last stage
        self._gradients, self.autocast = gradients, autocast
        self.memory = memory if memory is not None else StepMemory()
        self.layers.keeping = self.memory.checkpointed
        self._batch = StepBatch()
        # parameters whose gradients are summed, in the present step: a walk over all modules is long beside an action
        self._summed: list[nn.Parameter] = []
        self._inputs: dict[Unit, Any] = {}
        self._outputs: dict[Unit, Any] = {}
        # micro-batches with some of their weight gradients made, and how many groups of layers have all
        self._making: dict[int, int] = {}

    @property
    def dims(self) -> SequenceDims | None:
        """Its sequence dimensions in training, or in evaluation; None before the first cut there."""
        return self._dims.get(self.root.training)

    @dims.setter
    def dims(self, found: SequenceDims) -> None:
        self._dims[self.root.training] = found

    def begin(self, batch: StepBatch, losses: StepLosses | None, weights_apart: bool) -> None:
        """Begin a step. ``losses``: only on the last stage; ``weights_apart``: weight gradients are separate
        actions."""
        self._batch, self.losses = batch, losses
        self._summed = summed(p for module in self.layers.modules for p in module.parameters())
        self.context.documents_of = batch.documents
        self.context.weight_gradients = self.weight_gradients if weights_apart else None

    def forward(self, unit: Unit, inputs: Any) -> Any:
        """Run a unit forward and return its outputs; the last stage also adds them to its losses.

        ``inputs`` are leaves in the stage's own memory; those that require a gradient get one in `backward`.
        """
        span, trains = self._batch.span(unit), self.trains and torch.is_grad_enabled()
        kept = inputs
        if trains and self.layers.is_reentrant and not any(tensor.requires_grad for tensor in as_tuple(inputs)):
            for tensor in as_tuple(inputs):  # else autograd would not run the first checkpoint's recomputation
                tensor.requires_grad_(tensor.is_floating_point())
            kept = ()  # their gradients are not needed
        measured = self.memory.forward(self.number, span)
        with torch.set_grad_enabled(trains), self.context.forward(unit, span), self.autocast(), measured:
            outputs = self.layers(aliases(inputs))
        if not torch.is_grad_enabled():
            checkpointing.reset()  # as in DeepSpeed: no backward pass frees the buffers of its checkpoints
        waiting: tuple[Sequence[Tensor], Sequence[Tensor]] = as_tuple(outputs), ()
        if self.losses is not None:
            with self.memory.saving():
                self.losses.add(unit, outputs)
            waiting = self.losses.waiting(unit)
        elif trains:
            self._outputs[unit] = outputs
        received = as_tuple(inputs) if self.number > 0 else ()
        self.memory.kept(
            self.number, (*received, *waiting[0]), waiting[1], lambda: self.context.buffers(unit.micro_batch)
        )
        complete = self._batch.is_last_slice(unit)
        if complete:
            self.memory.buffers(self.number, self.context.buffers(unit.micro_batch))
        if trains:
            self._inputs[unit] = kept
        elif complete:
            self.context.release(unit.micro_batch)
        return outputs

    def refuse_detached(self, inputs: Any) -> None:
        """Raise ConfigError if reentrant checkpointing of the first layer trains nothing: no floating point input."""
        if self.trains and self.layers.detaches(as_tuple(inputs)):
            raise ConfigError(
                "pipeline.use_reentrant: got true with a checkpointed first layer whose inputs are whole numbers, must be false "
                'or that layer gets no gradient, use "pipeline": {"use_reentrant": false}'
            )

    def backward(self, unit: Unit, gradients: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Run a unit backward from the gradients of its outputs (None on the last stage, which starts from its loss).

        Returns the gradients of those inputs that required one; an unused input has a zero gradient.
        """
        first, last = self._batch.is_last_slice(unit), unit.slice == 0  # slices go backward in descending order
        with self._gradients.around(self._summed, first, last):
            if self.losses is not None:
                self.losses.backward_whole(unit, self._gradients.scale)
            with self.context.backward(unit, self._batch.span(unit)):
                if self.losses is not None:
                    self.losses.backward(unit, self._gradients.scale)
                else:
                    outputs = [t for t in as_tuple(self._outputs.pop(unit)) if t.requires_grad]
                    torch.autograd.backward(outputs, gradients)
        self.memory.gradient_sums(self.number, lambda: self._gradients.summed_bytes(self._summed))
        if last:
            self.context.release(unit.micro_batch)
        inputs = [t for t in as_tuple(self._inputs.pop(unit)) if t.requires_grad]
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]

    def make_weight_gradients(self, unit: Unit, group: Group = ALL) -> None:
        """Make the weight gradients of the unit's slice and later slices of its micro-batch, in a group of the layers."""
        micro_batch, first_slice = unit
        first, made = micro_batch not in self._making, self._making.pop(micro_batch, 0) + (first_slice == 0)
        last, layers = made == group.groups, group.layers(len(self.layers.functions))
        if not last:
            self._making[micro_batch] = made
        of = None if group == ALL else (lambda weight: self.layers.layer_of(weight) in layers)
        made_here = self.memory.weight_gradients(self.number, self.weight_gradients)
        with self._gradients.around(self._summed, first, last), made_here:
            self.weight_gradients.make(micro_batch, first_slice, of)

    @property
    def left_over(self) -> int:
        """Sum of the units, micro-batches and bytes that no action has taken; 0 after a step."""
        losses = 0 if self.losses is None else len(self.losses)
        kept = len(self._inputs) + len(self._outputs) + len(self._making) + losses
        return kept + self.context.micro_batches + self.weight_gradients.kept_bytes

    def end(self) -> None:
        """End the step, after an error too: drop everything that it left."""
        self._inputs.clear()
        self._outputs.clear()
        self._making.clear()
        self.weight_gradients.clear()
        self.context.clear()
        self.context.weight_gradients, self.context.documents_of = None, {}
        self._batch, self.losses, self._summed = StepBatch(), None, []  # inputs and labels are no longer needed
