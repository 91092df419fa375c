"""One step from its data to its losses: read, agree, cut, inspect, run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.pipeline.batch import StepBatch, read_step
from ds_terapipe.pipeline.inspection.first_batch import Inspection
from ds_terapipe.pipeline.inspection.sequence_dims import LEAST_TOKENS
from ds_terapipe.pipeline.layer_range import modules_of
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
        self._verified: set[Any] = set()  # what `_modes` was when all layers were; holds after moves too
        self._kinds: dict[bool, set[int]] = {True: set(), False: set()}  # of data, verified so; on the first stage
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
            is_new = not self._kinds[torch.is_grad_enabled()].issuperset(batch.kinds)
            header = Header(tuple(batch.lengths), tuple(batch.signatures), (), batch.documents, is_new)
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

        ``defers``: whether weight gradients are made once per micro-batch. Later micro-batches are verified where their
        data are of another kind than all before.

        Returns:
            Whether the dimensions were found now.
        """
        is_inspected = runtime.is_inspected
        if not batch.is_cut or (is_inspected and not batch.is_new):
            return False
        check_loss(self._module.loss_fn)
        loss_fn = self._module.loss_fn if request.compute_loss else None
        look = partial(Inspection, runtime, self._consensus, settings, loss_fn=loss_fn, defers=defers)
        modes = self._modes(runtime) if settings.verify and not is_inspected else None
        verifies = modes is not None and modes not in self._verified
        if not is_inspected:
            look(verifies=verifies).run(batch.only(0))
            self._verified.add(modes)
        for number in self._of_new_kinds(batch, runtime.multiple) if batch.is_new else ():
            if number or not verifies:
                look(verifies=True).run(batch.only(number))
        return not is_inspected

    def _modes(self, runtime: PipelineRuntime) -> Any:
        """Return which modules of each layer train, frozen ones do not, and whether there are gradients; collective."""
        mine = {
            number: hash(tuple(part.training for owner in modules_of(layer) for part in owner.modules()))
            for stage in runtime.stages.values()
            for number, layer in enumerate(stage.layers.functions, stage.layers.first)
        }
        everywhere = [layers.items() for layers in self._consensus.gather(mine)]
        return torch.is_grad_enabled(), frozenset().union(*everywhere)

    def _of_new_kinds(self, batch: StepBatch, multiple: int) -> list[int]:
        """Return the micro-batches that are the first of their kind in some pipeline, and note their kinds; collective."""
        known = self._kinds[torch.is_grad_enabled()]
        new = {kind: number for number, kind in reversed(list(enumerate(batch.kinds))) if kind not in known}
        least = LEAST_TOKENS * multiple
        cut = {number for number, spans in enumerate(batch.spans) if len(spans) > 1 and batch.lengths[number] >= least}
        said = self._consensus.gather((new, cut))
        everywhere = set.intersection(*(of_rank for _, of_rank in said))
        found = {kind: number for of_rank, _ in said for kind, number in of_rank.items() if number in everywhere}
        known.update(found)
        return sorted(set(found.values()))

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
