"""Evaluation: forward of a batch, cut like the training's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.pipeline.step_grid import FORWARD_ONLY, grid_of_step


class Evaluation(PipelineEngine):
    """Mixin before ``PipelineEngine``; the combined class prepares a batch and runs its schedule."""

    outputs: Any  # outputs of the last stage, on request

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate one batch without gradients; arguments and result see ``PipelineEngine.eval_batch``."""
        self._refuse_broken()
        if reduce_output not in ("avg", None):
            raise ConfigError(f'eval_batch: got reduce_output={shown(reduce_output)}, must be "avg" or None, use "avg"')
        if reduce_output is None and compute_loss and (bcast_loss or self.monitor.enabled):
            raise ConfigError(
                'eval_batch: got reduce_output=None where one loss goes to all stages, must be "avg" there, use bcast_loss=False'
            )
        self.module.eval()
        self.eval_return_logits, self._compute_loss = return_logits, compute_loss
        train_iterator = self.data_iterator
        self.set_dataiterator(data_iter)
        micro_batches = self.micro_batches if num_micro_batches is None else num_micro_batches
        try:
            with torch.no_grad():
                result = self._evaluate(micro_batches, compute_loss, reduce_output, bcast_loss)
        finally:
            self.set_dataiterator(train_iterator)
            self.eval_return_logits = False
        if self.global_rank == 0 and self.monitor.enabled and compute_loss:
            self.monitor.write_events([("Train/Samples/eval_loss", result.mean().item(), self.global_samples)])
        if return_logits:
            outputs, self.outputs = self.outputs, None
            return result, outputs
        return result

    def _evaluate(self, micro_batches: int, compute_loss: bool, reduce_output: str | None, bcast_loss: bool) -> Any:
        batch = self._next_step(micro_batches)
        batch.cut(self._slicer.now(batch.lengths).slices)
        self._inspect(batch)
        self.total_loss = self.total_additional_losses = None
        grid = grid_of_step(FORWARD_ONLY, self._runtime.placement, batch.slice_counts())
        result = None
        with self._poison_on_error():
            self._run(batch, grid, self.global_steps)
            with self._watchdog.waiting("the loss from the last stage"):
                if self.is_last_stage():
                    result = self._reduce_outputs(self.fwd_outputs, reduce=reduce_output, micro_batches=micro_batches)
                if compute_loss and (bcast_loss or self.monitor.enabled):
                    result = self._bcast_pipe_scalar(result)
        return result
