"""One step from its data to its losses: read, agree, cut, inspect, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.pipeline.batch import StepBatch, read_step
from ds_terapipe.pipeline.inspection.first_batch import Inspection
from ds_terapipe.pipeline.loss import StepLosses, check_loss, runs_per_slice
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.runtime import PipelineRuntime, Step
from ds_terapipe.pipeline.transport.consensus import Consensus, Header
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.refusals import check_checkpointing
from ds_terapipe.schedule import Grid


@dataclass(frozen=True)
class StepRequest:
    """Options of a training step or an evaluation.

    Attributes:
        micro_batches: number of micro-batches of each replica.
        compute_loss: whether the loss function runs.
        keep_outputs: whether to keep the model's outputs for the last micro-batch.
    """

    micro_batches: int
    compute_loss: bool = True
    keep_outputs: bool = False


class StepRunner:
    """Reads the micro-batches of steps and runs them, on a runtime and with settings that may change between steps.

    Args:
        module: the ``PipelineModule``; its grid gives the data-parallel group.
        consensus: consensus of the job.
        watchdog: bounds the waits.
        load: copies a micro-batch to the device.
        device: device of the layers.
    """

    def __init__(
        self,
        module: PipelineModule,
        consensus: Consensus,
        watchdog: Watchdog,
        load: Callable[[Any], Any],
        device: torch.device,
    ) -> None:
        self._module, self._consensus, self._watchdog = module, consensus, watchdog
        self._load, self._device = load, device
        # whether layers trained when all were verified, on any rank; holds after moves too
        self._verified: set[bool] = set()
        self._followed: dict[Any, Any] = {}

    def read(
        self,
        runtime: PipelineRuntime,
        settings: TokenPipelineConfig,
        request: StepRequest,
        number: int,
        pull: Callable[[], list[Any]],
    ) -> StepBatch:
        """Read all micro-batches of a step, and agree with all ranks that it can start; collective.

        Args:
            runtime, settings, request: of the step.
            number: of the step.
            pull: reads the items that this rank needs, (inputs, labels) each. An error in it is raised on every rank.

        Returns:
            The batch; not cut yet.
        """
        batch, weight, error = StepBatch(), None, None
        self._watchdog.begin(number, (), runtime.view)
        try:
            check_checkpointing(settings.slices)
            batch = self._cut_items(runtime, settings, request, pull())
            if torch.is_grad_enabled() and runtime.view.has_first:
                runtime.stages[0].refuse_detached(batch.inputs[0])
            weight = self._weight(batch) if runtime.view.has_last and request.compute_loss else None
        except Exception as problem:  # any error of the user's data is raised on every rank
            error = problem
        header = None
        if batch.lengths:
            header = Header(tuple(batch.lengths), tuple(batch.signatures), documents=batch.documents)
        weighs = None if weight is None else weight.numel() > 0
        micro_batches, placement = request.micro_batches, runtime.view.placement
        batch.multiple = runtime.multiple
        batch.adopt(self._consensus.announce(placement, header, micro_batches, error, weighs))
        if weight is not None and weighs:
            self._share_weight(weight)
        return batch

    def _cut_items(
        self, runtime: PipelineRuntime, settings: TokenPipelineConfig, request: StepRequest, items: Sequence[Any]
    ) -> StepBatch:
        view = runtime.view
        if not (view.has_first or view.has_last):
            return StepBatch()
        cut_labels = request.compute_loss and runs_per_slice(self._module.loss_fn)
        return read_step(
            items, settings, self._load, inputs=view.has_first, labels=view.has_last, cut_labels=cut_labels,
            documents_of=getattr(self._module, "documents_of", None), multiple=runtime.multiple, followed=self._followed,
        )  # fmt: skip

    def _weight(self, batch: StepBatch) -> Tensor | None:
        """Return the loss's weight for the step, empty if it has none; None for a loss without weights."""
        if not hasattr(self._module.loss_fn, "step_weight"):
            return None
        weight = self._module.loss_fn.step_weight(batch.labels)
        return torch.empty(0) if weight is None else weight.to(self._device)

    def _share_weight(self, weight: Tensor) -> None:
        """Give the loss the mean weight of all replicas."""
        grid = self._module.mpu()
        with self._watchdog.waiting("the number of labels of the other replicas", counts=False):
            torch.distributed.all_reduce(weight, group=grid.get_data_parallel_group())
        self._module.loss_fn.begin_step(weight / grid.data_parallel_size)

    def inspect(
        self,
        runtime: PipelineRuntime,
        settings: TokenPipelineConfig,
        request: StepRequest,
        batch: StepBatch,
        defers: bool,
    ) -> bool:
        """Find the sequence dimensions before the first sliced step and evaluation, and verify the slices; collective.

        ``defers``: whether weight gradients are made once per micro-batch.

        Returns:
            Whether this was done now.
        """
        if runtime.is_inspected or not batch.is_cut:
            return False
        check_loss(self._module.loss_fn)
        loss_fn = self._module.loss_fn if request.compute_loss else None
        trains = torch.is_grad_enabled()
        verifies = settings.verify and trains not in self._verified
        Inspection(runtime, self._consensus, settings, verifies, loss_fn, defers).run(batch)
        self._verified.add(trains)
        return True

    def run(
        self,
        runtime: PipelineRuntime,
        request: StepRequest,
        batch: StepBatch,
        grid: Grid,
        number: int,
        observers: Sequence[Observer],
    ) -> StepLosses | None:
        """Execute this rank's row of the grid; return the losses on the last stage, None on others."""
        losses = None
        if runtime.view.has_last:
            loss_fn = self._module.loss_fn if request.compute_loss else None
            losses = StepLosses(
                batch, loss_fn, runtime.output_cuts, keep_outputs=request.keep_outputs, sums=request.compute_loss
            )
        first = self._module.mpu().data_parallel_id * len(batch.spans)
        runtime.run(Step(number, batch, grid, losses, first), observers)
        return losses
