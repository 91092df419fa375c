"""Evaluation: forward of a batch, cut like the training's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ds_terapipe.errors import ConfigError, bad_value, shown
from ds_terapipe.pipeline.ended import poison_on_error
from ds_terapipe.pipeline.step_grid import FORWARD_ONLY, grid_of_step
from ds_terapipe.pipeline.step_runner import StepRequest
from ds_terapipe.pipeline.training import cut, inspect, read, run


def evaluate(
    engine: Any,
    data_iter: Iterator[Any],
    return_logits: bool = False,
    compute_loss: bool = True,
    reduce_output: str | None = "avg",
    bcast_loss: bool = True,
    num_micro_batches: int | None = None,
) -> Any:
    """Evaluate one batch on an engine without gradients; arguments and result see ``PipelineEngine.eval_batch``."""
    if reduce_output not in ("avg", None):
        raise ConfigError(f'eval_batch: got reduce_output={shown(reduce_output)}, must be "avg" or None, use "avg"')
    if reduce_output is None and compute_loss and (bcast_loss or engine.monitor.enabled):
        raise ConfigError(
            'eval_batch: got reduce_output=None where one loss goes to all stages, must be "avg" there, use bcast_loss=False'
        )
    micro_batches = engine.micro_batches if num_micro_batches is None else num_micro_batches
    if micro_batches < 1:
        raise bad_value("eval_batch: num_micro_batches", micro_batches, "1 or more", "1")
    engine.module.eval()
    train_iterator = engine.data_iterator
    engine.set_dataiterator(data_iter)
    try:
        with torch.no_grad():
            result = _run(engine, StepRequest(micro_batches, compute_loss, return_logits), reduce_output, bcast_loss)
    finally:
        engine.set_dataiterator(train_iterator)
    if engine.global_rank == 0 and engine.monitor.enabled and compute_loss:
        engine.monitor.write_events([("Train/Samples/eval_loss", result.mean().item(), engine.global_samples)])
    if return_logits:
        outputs, engine.outputs = engine.outputs, None
        return result, outputs
    return result


def _run(engine: Any, request: StepRequest, reduce_output: str | None, bcast_loss: bool) -> Any:
    with engine._controller.preparing(engine):
        batch = read(engine, request)
        cut(engine, batch, engine._slicer.now(batch.everywhere), request)
        inspect(engine, batch, request)
    grid = grid_of_step(FORWARD_ONLY, engine.placement, batch.slice_counts())
    result = None
    with poison_on_error(engine._watchdog):
        run(engine, batch, grid, request)
        with engine._watchdog.waiting("the loss from the last stage"):
            if engine.is_last_stage():
                outputs, count = engine.fwd_outputs, request.micro_batches
                result = engine._reduce_outputs(outputs, reduce=reduce_output, micro_batches=count)
            if request.compute_loss and (bcast_loss or engine.monitor.enabled):
                result = engine._bcast_pipe_scalar(result)
    return result
