"""Memory of one stage's tokens: its layers run by the engine's own code, on tensors without bytes.

The same meters that a live engine has count a step of this stage in a few cuts: what units keep (`StepMemory`), and the
peak beyond that, by which the memory model is calibrated.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from deepspeed.runtime.torch_autocast import autocast_if_enabled

from ds_terapipe.commands.checking.boundary import Alongside, Boundary
from ds_terapipe.commands.checking.inputs import Sample, StagePart
from ds_terapipe.commands.checking.peak import CountedPeak
from ds_terapipe.job import Job
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.batch import StepBatch, read_step
from ds_terapipe.pipeline.gradients import DeepSpeedGradients
from ds_terapipe.pipeline.inspection.first_batch import Inspection
from ds_terapipe.pipeline.inspection.sequence_dims import LEAST_TOKENS, probe_spans
from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.loss import StepLosses, check_loss, runs_per_slice
from ds_terapipe.pipeline.operators.context import SliceContext
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.recording.accounting import StepMemory
from ds_terapipe.pipeline.runtime import PipelineRuntime, Step, defers
from ds_terapipe.pipeline.slicing import slice_lengths
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.pipeline.step_grid import grid_of_step
from ds_terapipe.pipeline.token_shares import shares_of
from ds_terapipe.plan.costs.memory import StageMemory
from ds_terapipe.schedule import Placement

SCHEDULE = "1f1b"
_CUTS = (4, 2)  # slices of the steps that are counted
_NOBODY = SimpleNamespace(ended="", begin=lambda *args: None, watches=False)


class Counted(NamedTuple):
    """Memory of a stage's tokens.

    Attributes:
        memory: bytes per token of a micro-batch.
        peaks: lengths of the slices of each step that was counted, and its peak in bytes.
        after: the boundary to the next stage; None: there is none.
        defers: whether weight gradients are made apart where a micro-batch is cut.
    """

    memory: StageMemory
    peaks: tuple[tuple[tuple[int, ...], float], ...]
    after: Boundary | None
    defers: bool


class _Alone(Job):
    """Consensus of a single rank, which waits for no other."""

    watchdog = SimpleNamespace(waiting=lambda *args, **kwargs: nullcontext())

    def failures(self, error: BaseException | None, *_: Any) -> tuple[bool, bool]:
        """Return twice whether this rank has failed, see `Consensus.failures`."""
        return error is not None, error is not None


class StageRun:
    """Steps of one stage of an engine, alone.

    Args:
        engine: an engine with layers of this stage, on fake tensors.
        part: the stage.
        settings: the block ``token_pipeline``.
        before: the boundary to the stage before; None for the first one.
        sample: inputs and labels of a micro-batch.
        mode: the mode of the fake tensors.
    """

    def __init__(
        self, engine: Any, part: StagePart, settings: Any, before: Boundary | None, sample: Sample, mode: Any
    ) -> None:
        self._engine, self._settings, self._sample, self._mode = engine, settings, sample, mode
        self._micro_batches = counted_micro_batches(engine.gradient_accumulation_steps())
        self._module = module = engine.module
        self._number = number = part.number
        coming = before is not None and any(each.needs_grad for each in before.spec.tensors)
        chunks = ModelChunks(module)
        layers = [module] if len(chunks.ranges) == 1 else [each for f in part.functions for each in modules_of(f)]
        trains = coming or any(parameter.requires_grad for layer in layers for parameter in layer.parameters())
        stages = len(chunks.places)
        placement = Placement.plain(stages, chunks.parts, 0 if trains else number + 1)
        self._peak = CountedPeak()
        self._memory = StepMemory(self._peak)
        stage = Stage(
            number, part.functions, part.first, module=module, gradients=DeepSpeedGradients(engine), trains=trains,
            memory=self._memory, autocast=partial(autocast_if_enabled, engine),
        )  # fmt: skip
        self._batch = StepBatch()
        self._links = Alongside(before, lambda unit: self._batch.span(unit), mode)
        view = RankView(placement, number, tuple(range(stages)))
        stage.context.shares = shares_of(module, lambda divided: [divided])
        self._runtime = PipelineRuntime(view, {number: stage}, self._links, _NOBODY)  # type: ignore[arg-type]

    def count(self, cut: bool) -> Counted:
        """Run the steps and return what they took.

        Args:
            cut: whether micro-batches may be cut; else they are run whole.

        Raises:
            ConfigError: the model cannot be cut, as the launch's first step would say.
        """
        longest = self._sample.length
        most = longest // self._runtime.multiple
        counts = [count for count in _CUTS if count <= most] if cut and most >= LEAST_TOKENS else [1]
        peaks, deferring = [], False
        # fake tensors have no values, so recomputed keys are not compared
        unread = mock.patch.object(SliceContext, "check_step", lambda context: None)
        with unread, self._mode, torch.enable_grad():
            if counts != [1]:
                self._runtime.intercept()
                interception = self._runtime.interception
                deferring = defers(self._stage, interception) and self._engine.makes_weight_gradients_once()
            try:
                for count in counts:
                    if count > 1:
                        self._inspect(count)
                    taken = self._step(count, deferring)
                    peaks.append((slice_lengths(longest, count, self._runtime.multiple), taken))
                memory = self._memory.end()[self._number]
                dims, after = self._stage.dims, None
                if self._number < len(self._runtime.placement.stages) - 1:
                    after = Boundary.of(self._links.whole, None if dims is None else dims.outputs)
            finally:
                self._runtime.leave()
        return Counted(memory, tuple(peaks), after, deferring)

    @property
    def _stage(self) -> Stage:
        return self._runtime.stages[self._number]

    def _read(self, count: int) -> StepBatch:
        view, loss_fn = self._runtime.view, self._module.loss_fn
        settings = self._settings.model_copy(update={"slices": count, "verify": False})  # fake tensors have no values
        micro_batches = self._micro_batches
        lengths, signatures = [self._sample.length] * micro_batches, [0] * micro_batches
        batch = StepBatch(lengths=lengths, signatures=signatures)
        if view.has_first or view.has_last:
            batch = read_step(
                [self._sample.item] * micro_batches, settings, lambda value: value, inputs=view.has_first, labels=view.has_last,
                cut_labels=runs_per_slice(loss_fn),
            )  # fmt: skip
            batch.lengths, batch.signatures = lengths, signatures
        batch.multiple = self._runtime.multiple
        batch.cut(count)
        return batch

    def _inspect(self, count: int) -> None:
        if self._runtime.is_inspected:
            return
        check_loss(self._module.loss_fn)
        batch = self._batch = self._read(count)
        probe = Inspection(self._runtime, _Alone([0]), self._settings, False)  # type: ignore[arg-type]
        spans = probe_spans(batch.lengths[0], self._runtime.multiple)
        with mock.patch.object(self._links, "_span", lambda unit: spans[unit.slice]):
            probe.run(batch)

    def _step(self, count: int, defers: bool) -> float:
        """Run a step whose micro-batches have ``count`` slices and return its peak."""
        batch = self._batch = self._read(count)
        placement, view = self._runtime.placement, self._runtime.view
        deferring = tuple(range(len(placement.stages))) if defers and count > 1 else ()
        grid = grid_of_step(SCHEDULE, placement, (count,) * self._micro_batches, deferring)
        losses = None
        if view.has_last:
            losses = StepLosses(batch, self._module.loss_fn, self._runtime.output_cuts)
        parameters = list(self._module.parameters())
        for parameter in parameters:
            parameter.grad = None
        self._memory.begin(parameters)
        self._memory.note_peak(parameters)
        with self._peak:
            self._runtime.run(Step(0, batch, grid, losses))
        # ZeRO makes its buckets, and sums of 16-bit gradients in fp32, in a step's backwards; it drops them after it has reduced
        getattr(self._engine.optimizer, "_release_ipg_buffers", lambda: None)()
        for parameter in parameters:
            parameter.grad = None
            if hasattr(parameter, "grad_accum"):
                parameter.grad_accum = None
        return self._memory.taken or 0.0


def counted_micro_batches(micro_batches: int) -> int:
    """Return how many micro-batches the counted steps of a launch have: a second one finds gradients of the first."""
    return min(micro_batches, 2)
