"""Stage of the frozen layers at the model's beginning, whose outputs are cached."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ds_terapipe.elastic.cache.outputs import Compute, plain_attributes, versions_of
from ds_terapipe.elastic.cache.session import CacheSession
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.loss import StepLosses
from ds_terapipe.pipeline.slicing import Span, copy_of, part_of
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.refusals import has_own_forward
from ds_terapipe.schedule import Unit


class CachedStage(Stage):
    """In training, reads its outputs from the cache, or runs its layers on whole micro-batches and keeps the outputs.

    Outputs are read and computed for the whole micro-batch, whatever its slices.

    Args:
        *args, **kwargs: as for `Stage`; must be the model's first stage, and forward-only.
        session: the cache.
    """

    def __init__(self, *args: Any, session: CacheSession, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.number == 0 and not self.trains
        self._session = session
        self._whole: dict[int, Any] = {}  # outputs of micro-batches with slices still to come
        self.layers.timed = not session.wanted  # its outputs are read, at no cost
        self._can_start_inside = not has_own_forward(self.root)
        self._functions = self.layers.functions  # a step that times layers wraps them

    def begin(self, batch: StepBatch, losses: StepLosses | None, weights_apart: bool) -> None:
        """Extend `Stage.begin`: start to read the samples of the step."""
        super().begin(batch, losses, weights_apart)
        self._session.note(self._functions)
        if torch.is_grad_enabled():
            self._session.begin(self._functions, batch.documents)

    def forward(self, unit: Unit, inputs: Any) -> Any:
        """Override `Stage.forward`: return cached outputs in place of running the layers."""
        cache = self._session.cache
        if cache is None or not cache.active or not torch.is_grad_enabled():
            return super().forward(unit, inputs)
        number, span = unit.micro_batch, self._batch.span(unit)
        if number not in self._whole:
            whole = self._batch.cut_inputs(number, self._span(number))
            run, versions = functools.partial(self._run_whole, number), functools.partial(versions_of, self._functions)
            compute = Compute(run, self._can_start_inside, versions)
            self._whole[number] = cache.outputs(number, whole, compute)
        self.memory.forward(self.number, span)  # counts its tokens: nothing of them is kept for a backward
        outputs = self._whole[number]
        if self._batch.is_last_slice(unit):
            del self._whole[number]
        if span.is_whole:
            return copy_of(outputs)  # the next stage may write into its inputs while a thread writes these to a file
        assert self.dims is not None
        return part_of(outputs, self.dims.outputs, span)

    def _run_whole(self, micro_batch: int, inputs: Any, start: int, rows: Sequence[int] | None = None) -> Any:
        """Run the layers from ``start`` on inputs of a micro-batch, or of these rows of it."""
        documents = self._batch.documents.get(micro_batch)
        if documents is not None and rows is not None:
            documents = Documents([documents.runs[row] for row in rows], documents.total)
        self.context.documents_of = {} if documents is None else {micro_batch: documents}
        unit = Unit(micro_batch, 0)
        before = [] if rows is None else plain_attributes(self._functions)  # a pass for a comparison does not count
        with torch.no_grad(), self.context.forward(unit, self._span(micro_batch)), self.autocast():
            outputs = self.layers(copy_of(inputs), start)  # which may run again from the same
        for module, attributes in before:
            vars(module).update(attributes)
        self.context.release(micro_batch)
        self.context.documents_of = self._batch.documents
        return outputs

    def _span(self, micro_batch: int) -> Span:
        total = self._batch.lengths[micro_batch]
        return Span(0, total, total)

    @property
    def left_over(self) -> int:
        """Extend `Stage.left_over` by micro-batches that were not taken completely."""
        return super().left_over + len(self._whole)

    def end(self) -> None:
        """Extend `Stage.end` by the cache."""
        super().end()
        self._whole.clear()
        self._session.end(self._functions)
        self.layers.timed = not self._session.wanted
