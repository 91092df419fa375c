"""Before the first sliced step: where the sequence is between the layers, and whether the model can be cut at all.

Stages go one behind the other and agree after each, so that an error of one is raised by all and nobody waits for it. A stage
sends when all have agreed: the next one then comes straight to its receives, and after an error no message is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import nn

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.context import SliceContext, refuse_model
from ds_terapipe.pipeline.control import Control
from ds_terapipe.pipeline.layout import LEAST_TOKENS, Layout, LayoutProbe, check_outputs, probe_spans
from ds_terapipe.pipeline.slicing import as_tuple
from ds_terapipe.pipeline.spans import Span
from ds_terapipe.pipeline.verify import undisturbed, verify_stage
from ds_terapipe.pipeline.watch import PipelineStalled
from ds_terapipe.pipeline.wire import BoundarySpec, Wire
from ds_terapipe.schedule import Unit


@dataclass
class Inspection:
    """A look at one stage's model on the first micro-batch; the same on every rank, collective.

    ``module``: the PipelineModule; ``adapted``: names of its modules whose inside runs differently in a slice; ``autocast``:
    the engine's mixed-precision context; ``loss``: whether labels are there and a loss will be made of them; the rest are
    the engine's parts of the same name.
    """

    module: Any
    context: SliceContext
    wire: Wire
    control: Control
    config: TokenPipelineConfig
    adapted: list[str]
    autocast: Callable[[], AbstractContextManager[None]]
    stage: int
    stages: int
    loss: bool = True

    def run(self, batch: StepBatch) -> Layout:
        """The layout of this stage. Raises ConfigError, on every rank, for a model that can't be cut."""
        total = batch.lengths[0]
        self.control.agree(self._detached(batch))
        with undisturbed(self.module, self.context), self.autocast():
            short = None
            if total < LEAST_TOKENS:
                short = ConfigError(
                    f"token_pipeline.slices: got {self.config.slices} for {total} tokens, must be 1 below {LEAST_TOKENS}"
                )
            self.control.agree(short)
            probe = LayoutProbe(self.config.layout, self.module._local_start)
            first, second = probe_spans(total)
            self._through_stages(batch, (first, second), lambda inputs, span: self._probe(probe, inputs, span))
            layout = self._together(probe)
            if self.config.verify:
                whole = Span(0, total, total)
                self._through_stages(
                    batch,
                    (whole,),
                    lambda inputs, _: self._verify(batch, layout, inputs),
                )
        return layout

    def _verify(self, batch: StepBatch, layout: Layout, inputs: Any) -> Any:
        outputs = verify_stage(self.module, self.context, inputs, layout.layers, batch.spans[0], self.adapted)
        if self.loss and self.stage == self.stages - 1:
            try:
                self.module.loss_fn(outputs, batch.labels[0])
            except Exception as problem:
                raise ConfigError(
                    f"the data iterator: got labels that the loss_fn fails with, {describe(problem)}; must fit the model's "
                    "outputs for the whole sequence, use e.g. labels of the shape of the tokens"
                ) from problem
        return outputs

    def _detached(self, batch: StepBatch) -> ConfigError | None:
        """Reentrant checkpointing of a first layer that gets no floating point input trains nothing: autograd sees no way."""
        module = self.module
        if self.stage > 0 or not torch.is_grad_enabled() or module.activation_checkpoint_interval <= 0:
            return None
        first = module.forward_funcs[: module.activation_checkpoint_interval]
        learns = any(p.requires_grad for f in first if isinstance(f, nn.Module) for p in f.parameters())
        if (
            module.activation_checkpoint_func is checkpointing.non_reentrant_checkpoint
            or not module.is_checkpointable_results[0]
            or not learns
            or any(tensor.is_floating_point() for tensor in as_tuple(batch.inputs[0]))
        ):
            return None
        return ConfigError(
            "pipeline.use_reentrant: got true with a checkpointed first layer whose inputs are whole numbers, must be false "
            'or that layer gets no gradient, use "pipeline": {"use_reentrant": false}'
        )

    def _together(self, probe: LayoutProbe) -> Layout:
        error, layout = None, None
        try:
            layout = probe.result()
            if self.stage == self.stages - 1:
                check_outputs(layout.outputs)
        except ConfigError as problem:
            error = problem
        self.control.agree(error)
        assert layout is not None
        return layout

    def _probe(self, probe: LayoutProbe, inputs: Any, span: Span) -> Any:
        probe.begin_slice(span)
        with self.context.forward(0, span):
            for index, layer in enumerate(self.module.forward_funcs):
                probe.record(inputs)
                self.context.enter_layer(self.module._local_start + index)
                inputs = layer(inputs)
        probe.record(inputs)
        return inputs

    def _through_stages(self, batch: StepBatch, spans: tuple[Span, ...], run: Callable[[Any, Span], Any]) -> None:
        units = [Unit(0, index) for index in range(len(spans))]
        # an announcement each time: a receive that was posted ahead would be left over from an attempt that failed
        attempt = object()
        self.wire.begin(units, [], lambda unit: (attempt, unit))
        for stage in range(self.stages):
            error: BaseException | None = None
            outputs: list[Any] = []
            if stage == self.stage:
                try:
                    # all that was sent is taken before anything can fail
                    inputs = [self._inputs(batch, unit, span) for unit, span in zip(units, spans, strict=True)]
                    outputs = [self._run_unit(each, span, run) for each, span in zip(inputs, spans, strict=True)]
                except PipelineStalled:
                    raise
                except ConfigError as problem:
                    error = problem
                except Exception as problem:
                    error = refuse_model(f"run on a slice it fails, {describe(problem)}")
                    error.__cause__ = problem
            self.control.agree(error)
            if stage == self.stage < self.stages - 1:
                for unit, output in zip(units, outputs, strict=True):
                    self.wire.send_forward(unit, output)
        self.wire.finish()

    def _inputs(self, batch: StepBatch, unit: Unit, span: Span) -> Any:
        return batch.cut_inputs(0, span) if self.stage == 0 else self.wire.receive_forward(unit)

    def _run_unit(self, inputs: Any, span: Span, run: Callable[[Any, Span], Any]) -> Any:
        outputs = run(inputs, span)
        if self.stage < self.stages - 1:
            BoundarySpec.of(outputs).encode(torch.device("cpu"))  # whether it can be sent at all
        return outputs


def describe(error: BaseException) -> str:
    """Type and text of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
