"""DeepSpeed's handling of gradients, told that a micro-batch's backward comes in slices.

DeepSpeed 0.19.8 scales a loss, opens and closes its optimisers' backward pass and gathers gradients once per micro-batch
(``DeepSpeedEngine.backward`` in runtime/engine.py); here a micro-batch has several backward passes.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor


class SlicedGradients:
    """Stands before ``PipelineEngine``; the class that has both sets ``_gradient_sums``, a ``GradientSums``."""

    def _scale_loss(self: Any, loss: Tensor) -> Tensor:
        """Gradient accumulation and loss scaling, once (``DeepSpeedEngine.backward`` in 0.19.8 does the same to one loss)."""
        loss = loss / self.gradient_accumulation_steps()
        if isinstance(self.optimizer, ZeROOptimizer):
            return self.optimizer.scale_if_loss(loss)
        if self.torch_autocast_z0_gradscaler is not None:
            return self.torch_autocast_z0_gradscaler.scale(loss)
        scaling = getattr(self.optimizer, "loss_scale_config", None)  # FP16_Optimizer: its step divides by it
        return loss if scaling is None else loss.float() * scaling.cur_scale

    def _before_backward(self: Any) -> None:
        # DeepSpeed's hooks on gradients look at this flag; its optimisers gather 16-bit gradients per micro-batch
        self._running_engine_backward = True
        optimizer = self.optimizer
        if isinstance(optimizer, ZeROOptimizer) and not isinstance(optimizer, BF16_Optimizer):
            optimizer.clear_backward_seen_flag()
            optimizer.enter_backward()

    def _after_backward(self: Any, first: bool = True, last: bool = True) -> None:
        optimizer = self.optimizer
        if not last:
            self._gradient_sums.put_aside()
        elif not first:
            self._gradient_sums.give_back()
        if isinstance(optimizer, BF16_Optimizer):
            if last:
                # Adds what it finds in ``grad`` to its own sums. DeepSpeed clears ``grad`` before the next micro-batch; here
                # that one may have begun, and what has been added must not be there when it ends.
                optimizer.backward_epilogue()
                optimizer.clear_lp_grads(set_to_none=True)
        elif isinstance(optimizer, ZeROOptimizer):
            optimizer.backward_epilogue()
            optimizer.exit_backward()

    def _exec_reduce_grads(self: Any) -> None:
        """As DeepSpeed's; but one replica has nothing to reduce, where DeepSpeed flattens all gradients and copies them back."""
        if self.is_data_parallel or isinstance(self.optimizer, ZeROOptimizer):
            super()._exec_reduce_grads()  # type: ignore[misc]
            return
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None and parameter.numel() > 0:
                parameter.grad = torch.zeros_like(parameter)  # optimisers decay a weight whose gradient is zero
