"""DeepSpeed's gradient handling for micro-batches whose backward runs in slices.

DeepSpeed 0.19.8 scales a loss, enters and leaves its optimisers' backward pass and gathers gradients once per
micro-batch (``DeepSpeedEngine.backward`` in runtime/engine.py); here a micro-batch has several backward passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.deepspeed_state import add_to_sums, link_sums
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.operators.gradient_sums import GradientSums, summed


class DeepSpeedGradients:
    """The ``stage.GradientRules`` of an engine: DeepSpeed's hooks around the backward pass of a micro-batch.

    Args:
        engine: a ``PipelineEngine``.
    """

    def __init__(self, engine: Any) -> None:
        # weak, since the engine holds the stages that hold this
        self._engine: Any = weakref.proxy(engine)
        self._sums = GradientSums()
        inside = {p for layer in ModelChunks(engine.module).layers.values() for p in layer.parameters()}
        # e.g. weights of the loss, which are summed with those of any stage
        self._outside = summed(parameter for parameter in engine.module.parameters() if parameter not in inside)

    def scale(self, loss: Tensor) -> Tensor:
        """Scale a loss for gradient accumulation and mixed precision, as ``DeepSpeedEngine.backward`` (0.19.8)."""
        engine = self._engine
        loss = loss / engine.gradient_accumulation_steps()
        if isinstance(engine.optimizer, ZeROOptimizer):
            scaled: Tensor = engine.optimizer.scale_if_loss(loss)
            return scaled
        if engine.torch_autocast_z0_gradscaler is not None:
            by_autocast: Tensor = engine.torch_autocast_z0_gradscaler.scale(loss)
            return by_autocast
        scaling = getattr(engine.optimizer, "loss_scale_config", None)  # FP16_Optimizer: its step divides by it
        return loss if scaling is None else loss.float() * scaling.cur_scale

    @contextmanager
    def around(self, parameters: Iterable[Parameter], first: bool = True, last: bool = True) -> Iterator[None]:
        """Context manager around a backward pass of a stage; ``first``, ``last``: of its micro-batch.

        ``parameters``: those of the stage that are `summed`.
        """
        # DeepSpeed's hooks on gradients look at this flag; its optimisers gather 16-bit gradients per micro-batch
        engine, optimizer = self._engine, self._engine.optimizer
        engine._running_engine_backward = True
        if isinstance(optimizer, ZeROOptimizer) and not isinstance(optimizer, BF16_Optimizer):
            optimizer.clear_backward_seen_flag()
            optimizer.enter_backward()
        try:
            yield
        finally:
            engine._running_engine_backward = False
        # where BF16_Optimizer's sums over micro-batches are fp32, they take slices as well
        takes_slices = isinstance(optimizer, BF16_Optimizer) and optimizer.grad_acc_dtype == torch.float32
        if not (last or takes_slices):
            self._sums.put_aside([*parameters, *self._outside])
        elif not (first or takes_slices):
            self._sums.give_back([*parameters, *self._outside])
        if isinstance(optimizer, BF16_Optimizer):
            if last or takes_slices:
                # DeepSpeed clears ``grad`` before the next micro-batch; here that one may have begun, and what has been added
                # must not be there when it ends.
                add_to_sums(optimizer)
                optimizer.clear_lp_grads(set_to_none=True)
        elif isinstance(optimizer, ZeROOptimizer):
            optimizer.backward_epilogue()
            optimizer.exit_backward()

    def summed_bytes(self, parameters: Iterable[Parameter]) -> int:
        """Return the bytes of the fp32 sums of these parameters' gradients."""
        return self._sums.bytes_of(parameters)

    def clear(self) -> None:
        """Drop gradients that a failed step has left."""
        self._sums.clear()


def gradient_name(engine: Any) -> str:
    """Return the attribute of a parameter in which an engine has the sum of its gradients at the end of a schedule."""
    if engine.using_bf16_optimizer:
        return "_hp_grad"
    return "grad_accum" if getattr(engine.optimizer, "use_grad_accum_attribute", False) else "grad"


def reduce_tied(engine: Any) -> None:
    """Reduce the gradients of trained tied weights over the stages that have them; collective.

    DeepSpeed 0.19.8 reduces frozen ones too with bf16, and misses sums of another type than the model's with ZeRO-1. A stage
    that does not use a weight has zeros.
    """
    name, optimizer = gradient_name(engine), engine.optimizer
    tied = [each for each in engine.module.get_tied_weights_and_groups() if each[0].requires_grad]
    if name == "_hp_grad":
        link_sums(optimizer, [weight for weight, _ in tied])
    for weight, group in tied:
        gradient = getattr(weight, name)
        if gradient is None:
            dtype = optimizer.gradient_accumulation_dtype if name == "grad_accum" else None
            gradient = torch.zeros_like(weight, dtype=dtype)
        elif gradient.is_sparse:  # of an embedding; the head's gradient, or zeros, have all rows
            gradient = gradient.to_dense()
        setattr(weight, name, gradient)
        dist.all_reduce(gradient, group=group)
