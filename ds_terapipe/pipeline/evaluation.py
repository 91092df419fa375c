"""Evaluation: forward of a batch, cut like the training's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.pipeline.step_grid import FORWARD_ONLY, grid_of_step


def evaluate(
    engine: Any,
    data_iter: Iterator[Any],
    return_logits: bool,
    compute_loss: bool,
    reduce_output: str | None,
    bcast_loss: bool,
    num_micro_batches: int | None,
) -> Any:
    """Evaluate one batch on an engine without gradients; arguments and result see ``PipelineEngine.eval_batch``."""
    if reduce_output not in ("avg", None):
        raise ConfigError(f'eval_batch: got reduce_output={shown(reduce_output)}, must be "avg" or None, use "avg"')
    if reduce_output is None and compute_loss and (bcast_loss or engine.monitor.enabled):
        raise ConfigError(
            'eval_batch: got reduce_output=None where one loss goes to all stages, must be "avg" there, use bcast_loss=False'
        )
    engine.module.eval()
    engine.eval_return_logits, engine._compute_loss = return_logits, compute_loss
    train_iterator = engine.data_iterator
    engine.set_dataiterator(data_iter)
    micro_batches = engine.micro_batches if num_micro_batches is None else num_micro_batches
    try:
        with torch.no_grad():
            result = _run(engine, micro_batches, compute_loss, reduce_output, bcast_loss)
    finally:
        engine.set_dataiterator(train_iterator)
        engine.eval_return_logits = False
    if engine.global_rank == 0 and engine.monitor.enabled and compute_loss:
        engine.monitor.write_events([("Train/Samples/eval_loss", result.mean().item(), engine.global_samples)])
    if return_logits:
        outputs, engine.outputs = engine.outputs, None
        return result, outputs
    return result


def _run(engine: Any, micro_batches: int, compute_loss: bool, reduce_output: str | None, bcast_loss: bool) -> Any:
    batch = engine._next_step(micro_batches)
    batch.cut(engine._slicer.now(batch.lengths).slices)
    engine._inspect(batch)
    engine.total_loss = engine.total_additional_losses = None
    grid = grid_of_step(FORWARD_ONLY, engine.placement, batch.slice_counts())
    result = None
    with engine._poison_on_error():
        engine._run(batch, grid, engine.global_steps)
        with engine._watchdog.waiting("the loss from the last stage"):
            if engine.is_last_stage():
                result = engine._reduce_outputs(engine.fwd_outputs, reduce=reduce_output, micro_batches=micro_batches)
            if compute_loss and (bcast_loss or engine.monitor.enabled):
                result = engine._bcast_pipe_scalar(result)
    return result
