"""Training step of an engine: the pipeline's schedule, then DeepSpeed's reductions, optimizer and loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_terapipe.pipeline.autotune.engine_facts import follow_micro_batch
from ds_terapipe.pipeline.autotune.slice_plan import SlicePlan
from ds_terapipe.pipeline.batch import StepBatch, own
from ds_terapipe.pipeline.ended import poison_on_error
from ds_terapipe.pipeline.loss import runs_per_slice
from ds_terapipe.pipeline.operators.interception import hooked_line, not_deferred_line, written_line
from ds_terapipe.pipeline.recording.report import emit, log_step
from ds_terapipe.pipeline.replicas import reduce_replicas
from ds_terapipe.pipeline.step_grid import grid_of_step
from ds_terapipe.pipeline.step_runner import StepRequest
from ds_terapipe.pipeline.token_shares import applied_to_parts, sum_over_parts
from ds_terapipe.pipeline.trained import check_optimizer
from ds_terapipe.schedule import Grid


def train(engine: Any) -> Tensor:
    """Run one optimiser step of an engine; arguments and result see ``TokenPipelineEngine.train_batch``."""
    engine._controller.enter_training(engine)
    engine._controller.agree_on_seed(engine)
    started, request = time.perf_counter(), StepRequest(engine.micro_batches)
    with engine._controller.preparing(engine):
        batch = read(engine, request)
        follow_micro_batch(engine)
        slicer, recorder = engine._slicer, engine._recorder
        plan = slicer.plan(batch.lengths, batch.everywhere)
        cut(engine, batch, plan, request)
        inspect(engine, batch, request)
    counts = batch.slice_counts()
    grid = grid_of_step(plan.schedule, engine.placement, counts, _deferring(engine) if batch.is_cut else ())
    step = engine.global_steps + 1
    traced = engine._trace.wants(step)
    recorder.begin(step, wanted=traced or plan.recorded)
    with poison_on_error(engine._watchdog):
        with engine._layer_times.step(plan.times_layers or engine._controller.times_layers):
            run(engine, batch, grid, request)
        _finish(engine)
    if plan.timed:
        engine._clock.wait()
    seconds = time.perf_counter() - started
    events = recorder.end()
    if traced:
        engine._trace.add(step, events)
    log_step(engine, engine._report, batch, str(plan.schedule), seconds)
    slicer.record_step(events, seconds)
    mean: Tensor = engine.agg_train_loss
    return mean


def read(engine: Any, request: StepRequest) -> StepBatch:
    """Read a step's micro-batches on the ranks that need them, and agree that it can start; collective."""

    def pull() -> list[Any]:
        items: list[Any] = engine._controller.read(engine, lambda: own(engine._next_batch()), request.micro_batches)
        if torch.is_grad_enabled():  # not before, since ranks may read for each other
            check_optimizer(engine)
        return items

    found: StepBatch = engine._steps.read(engine._runtime, engine.token_pipeline, request, engine.global_steps, pull)
    return found


def cut(engine: Any, batch: StepBatch, plan: SlicePlan, request: StepRequest) -> None:
    """Cut the micro-batches of a step.

    Slices that are padding only are left out where no output of them is asked for, and no cost of them is measured.
    """
    asked = request.keep_outputs or not request.compute_loss or plan.timed
    batch.cut(plan.slices, skips_padding=not asked and runs_per_slice(engine.module.loss_fn))


def inspect(engine: Any, batch: StepBatch, request: StepRequest) -> None:
    """Inspect the model before the first sliced step, and log what its slices do instead of micro-batches; collective."""
    once = engine.makes_weight_gradients_once()
    if engine._steps.inspect(engine._runtime, engine.token_pipeline, request, batch, once) and torch.is_grad_enabled():
        written = [name for stage in engine._runtime.stages.values() for name in stage.written]
        found = engine._consensus.gather((engine.not_deferred, engine.hooked, written))
        lines = not_deferred_line, hooked_line, written_line
        for line, names in zip(lines, zip(*found, strict=True), strict=True):
            if any(names) and engine.global_rank == 0:
                emit(line(sorted({name for of_rank in names for name in of_rank})))


def run(engine: Any, batch: StepBatch, grid: Grid, request: StepRequest) -> None:
    """Run the schedule, and hand the losses to DeepSpeed's methods, which read them from the engine."""
    engine._replicas.expect(grid[engine._runtime.view.place])
    observers = [engine._replicas, *engine.observers, engine._recorder, engine._layer_times]
    try:
        losses = engine._steps.run(engine._runtime, request, batch, grid, engine.global_steps, observers)
    except BaseException:
        engine._gradients.clear()
        raise
    engine.fwd_outputs = [] if losses is None else losses.values
    engine.total_loss = None if losses is None else losses.total
    engine.total_additional_losses = None
    if losses is not None:
        engine.outputs = losses.outputs
        if torch.is_grad_enabled():
            engine.loss = losses.values[-1]


def _deferring(engine: Any) -> tuple[int, ...]:
    """Return the stages with separate weight gradients, once per micro-batch; the same on all ranks."""
    return engine._runtime.deferring(engine._consensus) if engine.makes_weight_gradients_once() else ()


def _finish(engine: Any) -> None:
    """Finish a step after its schedule: reduce gradients, update weights, bring the loss to all stages."""
    collective = engine._recorder.collective
    if partial := applied_to_parts(engine.module):
        with collective("shared tokens", "the all-reduce of gradients over ranks that share tokens or heads"):
            sum_over_parts(engine, partial)
    with collective("tied gradients", "the all-reduce of tied gradients"):
        engine._exec_reduce_tied_grads()
    with collective("gradients", "the all-reduce of gradients over data-parallel replicas"):
        reduce_replicas(engine, engine._exec_reduce_grads)
    with (
        collective("optimiser", "the optimiser step of the other ranks", counts=False),
        engine._controller.optimizer_step(engine),
    ):
        engine._exec_optimizer_step()
    with collective("loss", "the loss from the last stage"), torch.no_grad(), _fp32_by_default():
        engine.agg_train_loss = engine._aggregate_total_loss()


@contextmanager
def _fp32_by_default() -> Iterator[None]:
    """Context manager for DeepSpeed 0.19.8, which sends losses in fp32, and receives them in PyTorch's default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
