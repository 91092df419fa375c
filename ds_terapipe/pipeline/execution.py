"""What each action of a schedule does on this stage: one method per operation.

A row of the schedule is run by the engine, ``_execute`` for one action after the other. Slices of a micro-batch go forward in
ascending order and backward in descending order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor

from ds_terapipe.pipeline.loss import MicroBatchLoss
from ds_terapipe.pipeline.slicing import as_tuple, like
from ds_terapipe.schedule import Action, Op, Unit
from ds_terapipe.tracing.chrome import PACKING


class ActionExecution:
    """Stands before ``PipelineEngine``; the class that has both holds what actions leave for later ones, by unit: ``_inputs``,
    ``_outgoing``, ``_outputs``, ``_gradients``; ``_losses`` and ``_weight_gradients`` by micro-batch."""

    def _execute(self: Any, action: Action) -> None:
        self._ACTIONS[action.op](self, action.unit)

    def _pack_weights(self: Any, op: Op) -> None:
        """Pack what is used from this action on, in the step's first wait of its kind if there is one.

        The first stage's forward waits for nobody, and the last stage never waits for a gradient.
        """
        forward = op is Op.RECV_FORWARD or (op is Op.FORWARD and self.is_first_stage())
        backward = op is Op.RECV_BACKWARD or (op is Op.RECV_FORWARD and self.is_last_stage())
        packed = self._context.packed_weights
        due = packed.due(forward, backward, waiting=op.is_receive)
        if due:
            with self._recorder.collective(PACKING):
                packed.pack(due)

    def _forward(self: Any, unit: Unit) -> None:
        span = self._batch.span(unit)
        inputs = self._batch.cut_inputs(unit.micro_batch, span) if self.is_first_stage() else self._inputs[unit]
        if self.is_first_stage() and self._reentrant_activation_checkpointing():
            for tensor in as_tuple(inputs):
                tensor.requires_grad_(tensor.is_floating_point() and torch.is_grad_enabled())
        if checkpointing.PARTITION_ACTIVATIONS or checkpointing.CPU_CHECKPOINT:
            # these checkpoints take the data out of the tensors that they are given, and ours wait for their gradients
            inputs = like(inputs, [tensor.view_as(tensor) for tensor in as_tuple(inputs)])
        measured = self._memory.forward(span, lambda: self._context.buffers(unit.micro_batch))
        with self._context.forward(unit.micro_batch, span), self._autocast(), measured:
            outputs = self.module(inputs)
        if not self.module.training:
            checkpointing.reset()  # as DeepSpeed does: no backward pass comes to empty the buffers of its checkpoints
        self._live.forward(unit, span)
        if self._batch.is_last_slice(unit):
            self._memory.buffers(self._context.buffers(unit.micro_batch))
        if self.is_last_stage():
            self._take_outputs(unit, outputs)
        else:
            self._outgoing[unit] = outputs
            if torch.is_grad_enabled():
                self._outputs[unit] = outputs
        if not torch.is_grad_enabled():
            self._inputs.pop(unit, None)
            if self._batch.is_last_slice(unit):
                self._context.release(unit.micro_batch)

    def _take_outputs(self: Any, unit: Unit, outputs: Any) -> None:
        m = unit.micro_batch
        if unit.slice == 0:
            self._losses[m] = self._new_loss(m)
        loss = self._losses[m]
        loss.add(outputs, keep_outputs=self.eval_return_logits)
        if not self._batch.is_last_slice(unit):
            return
        value = loss.value
        parts = [value] if isinstance(value, Tensor) else list(value)
        detached = [part.detach() for part in parts]
        self.fwd_outputs.append(detached[0] if isinstance(value, Tensor) else detached)
        if self.eval_return_logits:
            self.outputs = loss.outputs
        if self._compute_loss:
            total = self.total_loss
            if isinstance(value, Tensor):
                self.total_loss = detached[0].clone() if total is None else total + detached[0]
            else:
                self.total_loss = detached if total is None else [a + b for a, b in zip(total, detached, strict=True)]
        if torch.is_grad_enabled():
            self.loss = detached[0]
        else:
            del self._losses[m]

    def _new_loss(self: Any, micro_batch: int) -> MicroBatchLoss:
        batch, loss_fn = self._batch, self.module.loss_fn if self._compute_loss else None
        label_cuts = batch.label_cuts[micro_batch] if batch.label_cuts else None
        output_cuts = self._layout.outputs if self._layout is not None else None
        return MicroBatchLoss(loss_fn, batch.labels[micro_batch], label_cuts, output_cuts, batch.spans[micro_batch])

    def _backward(self: Any, unit: Unit) -> None:
        first, last = self._batch.is_last_slice(unit), unit.slice == 0  # slices go backward in descending order
        self._before_backward()
        span = self._batch.span(unit)
        try:
            with self._context.backward(unit.micro_batch, span):
                if self.is_last_stage():
                    self._losses[unit.micro_batch].backward(unit.slice, self._scale_loss)
                else:
                    outputs = [t for t in as_tuple(self._outputs.pop(unit)) if t.requires_grad]
                    torch.autograd.backward(outputs, self._gradients.pop(unit))
        finally:
            self._running_engine_backward = False
        self._after_backward(first, last)
        self._live.backward(unit)
        if last:
            self._context.release(unit.micro_batch)
            self._losses.pop(unit.micro_batch, None)

    def _make_weight_gradients(self: Any, unit: Unit) -> None:
        self._memory.weight_gradients(self._weight_gradients)
        self._before_backward()
        try:
            self._weight_gradients.make(unit.micro_batch)
        finally:
            self._running_engine_backward = False
        self._after_backward()

    def _receive_forward(self: Any, unit: Unit) -> None:
        self._inputs[unit] = self._wire.receive_forward(unit)
        self._memory.message("received", self._inputs[unit])

    def _send_forward(self: Any, unit: Unit) -> None:
        outputs = self._outgoing.pop(unit)
        self._memory.message("sent", outputs)
        self._wire.send_forward(unit, outputs)

    def _receive_backward(self: Any, unit: Unit) -> None:
        self._gradients[unit] = self._wire.receive_backward(unit)

    def _send_backward(self: Any, unit: Unit) -> None:
        self._wire.send_backward(unit, self._inputs.pop(unit))

    _ACTIONS: dict[Op, Callable[[Any, Unit], None]] = {
        Op.FORWARD: _forward,
        Op.BACKWARD: _backward,
        Op.WEIGHT_GRADIENTS: _make_weight_gradients,
        Op.SEND_FORWARD: _send_forward,
        Op.RECV_FORWARD: _receive_forward,
        Op.SEND_BACKWARD: _send_backward,
        Op.RECV_BACKWARD: _receive_backward,
    }
