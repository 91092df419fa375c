"""Inspection of the model before the first sliced step: sequence dimensions, and a comparison of slices with the whole.

Stages run one after another and agree after each, so an error of one is raised by all without a deadlock. A stage sends
after the agreement: the next one then comes straight to its receives, and after an error no message is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.job import error_of
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.inspection.differences import TOLERANCE
from ds_terapipe.pipeline.inspection.sequence_dims import LEAST_TOKENS, SequenceProbe, check_outputs, probe_spans
from ds_terapipe.pipeline.inspection.verify import Gather, draws_kept, undisturbed, verify_stage
from ds_terapipe.pipeline.loss import MicroBatchLoss
from ds_terapipe.pipeline.operators.context import refuse_model
from ds_terapipe.pipeline.runtime import PipelineRuntime
from ds_terapipe.pipeline.slicing import Span, TensorCut, aliases, as_tuple, copy_of, like, part_of, tensors_in
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.pipeline.transport.boundary import BoundarySpec, check_sendable
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.watchdog import PipelineStalled
from ds_terapipe.schedule import Action, Op, Unit

LONGEST = 2048  # tokens that are run whole
_NO_ROOM = "token_pipeline.verify"
_PATIENCE_S = 30.0  # of a rank that has failed while those that share its layers may wait for it in one of them
_LEAST_LOSS = 1e-3  # smaller losses are compared as if they were this large


def verified(spans: Sequence[Span], multiple: int = 1) -> tuple[Span, ...]:
    """Return the slices to compare with the whole: those of the sequence, or of the beginning of a long one.

    A layer that mixes tokens, or makes positions, also does so there, and whole layers of long sequences may not fit
    into memory. Slices stay multiples of ``multiple``.
    """
    total = spans[-1].stop
    if total <= LONGEST:
        return tuple(spans)
    most = LONGEST // multiple
    inner = {min(max(round(span.stop * most / total), 1), most - 1) for span in spans[:-1]}
    stops = [multiple * stop for stop in (*sorted(inner), most)]
    return tuple(Span(start, stop, stops[-1]) for start, stop in zip([0, *stops], stops, strict=False))


@dataclass
class Inspection:
    """Inspection of the model on a batch's first micro-batch; the same on every rank, collective.

    Every stage learns its sequence dimensions, unless it knows them. ``verifies``: whether to compare slices with the
    whole; ``loss_fn``: None if there is no loss; ``defers``: whether weight gradients are made once per micro-batch;
    ``trains``: whether a loss will run backward.
    """

    runtime: PipelineRuntime
    consensus: Consensus
    config: TokenPipelineConfig
    verifies: bool
    loss_fn: Callable[..., Any] | None = None
    defers: bool = False
    trains: bool = field(default_factory=torch.is_grad_enabled)

    def run(self, batch: StepBatch) -> None:
        """Run the inspection. Raises ConfigError, on every rank, for a model that cannot be cut."""
        total, shares, multiple = batch.lengths[0], self.runtime.shares, self.runtime.multiple
        for stage in self.runtime.stages.values():
            stage.context.documents_of = batch.documents
        known = [(stage, stage.dims) for stage in self.runtime.stages.values() if stage.dims is not None]
        with self._trial():
            short = None
            least = LEAST_TOKENS * multiple
            if total < least:
                short = ConfigError(
                    f"token_pipeline.slices: got {self.config.slices} for {total} tokens, must be 1 below {least}"
                )
            self.consensus.agree(short)
            probes = {
                number: SequenceProbe(self.config.layout, stage.layers.first, stage.layers.text, shares)
                for number, stage in self.runtime.stages.items()
            }
            self._through_stages(
                batch,
                probe_spans(total, multiple),
                lambda stage, inputs, span: _probe(stage, probes[stage.number], inputs, span),
            )
            self.consensus.together(lambda: self._set_dims(probes))
        if self.verifies:
            self._compare(batch)
        for stage, dims in known:
            stage.dims = dims

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Context manager around one run: a layer that sets itself up in its first one does so in each."""
        parts = {stage.context: stage.root for stage in self.runtime.stages.values()}
        with undisturbed(parts, self.loss_fn), self.runtime.autocast():
            yield

    def _compare(self, batch: StepBatch) -> None:
        """Compare the beginning of a long sequence, and if that fails all of it: a mask may have full length.

        If the whole sequence does not fit into memory, the result of the beginning counts.
        """
        found: list[str] = []
        end = batch.spans[0][-1].stop  # padding behind it is not run
        cut = tuple(Span(span.start, span.stop, end) for span in batch.spans[0])
        for spans in (verified(cut, self.runtime.multiple), cut):  # as many on all replicas, whose ends differ
            whole = (Span(0, spans[-1].stop, spans[-1].stop),)
            try:
                with self._trial():
                    self._through_stages(batch, whole, partial(self._verify, batch, spans))
                return
            except ConfigError as error:  # on every rank
                found.append(str(error))  # not the error, whose frames hold tensors
        raise ConfigError(next((each for each in reversed(found) if not each.startswith(_NO_ROOM)), found[0]))

    def _verify(self, batch: StepBatch, spans: Sequence[Span], stage: Stage, inputs: Any, _: Span) -> Any:
        assert stage.dims is not None
        adapted = [] if self.runtime.interception is None else self.runtime.interception.adapted
        gather = partial(self._gather, stage.root)
        try:
            outputs, stage.written = verify_stage(
                stage.root, stage.layers, stage.context, stage.layers.received(inputs), stage.dims, spans, adapted,
                trains=self.trains and stage.trains, gather=gather,
                keeper=stage.weight_gradients if self.defers else None,
            )  # fmt: skip
        except torch.OutOfMemoryError as problem:
            raise ConfigError(
                f"{_NO_ROOM}: got true, must be false where {spans[-1].stop} tokens of a layer, whole, do not fit "
                f"beside all that goes in and out of its modules ({one_line(problem)}), use false"
            ) from problem
        if self.loss_fn is not None and self._is_last(stage):
            try_loss = partial(self._try_loss, batch, outputs, stage.dims.outputs, spans)
            error = error_of(partial(self._check_loss, try_loss))
            if not any(gather(error is not None)):
                _check_alone(stage, inputs, spans[-1].stop, try_loss, gather)
            elif error is not None:  # otherwise another rank's, which is raised on this one too
                raise error
        return outputs

    def _check_loss(self, try_loss: Callable[[], Any]) -> None:
        try:
            loss = try_loss()
        except ConfigError:
            raise
        except Exception as problem:
            raise ConfigError(
                f"the data iterator: got labels that the loss_fn fails with, {one_line(problem)}; must fit the model's "
                "outputs for the whole sequence, use e.g. labels of the shape of the tokens"
            ) from problem
        if self.trains and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise ConfigError(
                f"loss_fn: got {type(loss).__name__} from it, must be a tensor of one number in training, use a sum of losses"
            )

    def _try_loss(self, batch: StepBatch, outputs: Any, cuts: Sequence[TensorCut], spans: Sequence[Span]) -> Any:
        """Return the loss of the first tokens, or of outputs of full length if labels are not cut.

        Raises ConfigError if a loss that runs slice by slice is another one then.
        """
        total, tokens = batch.lengths[0], spans[-1].stop
        label_cuts = batch.label_cuts[0] if batch.label_cuts else None
        if tokens < total and label_cuts is None:
            shapes = [
                [total if dimension == cut.row else size for dimension, size in enumerate(tensor.shape)]
                for tensor, cut in zip(as_tuple(outputs), cuts, strict=True)
            ]
            outputs = like(outputs, [t.new_zeros(shape) for t, shape in zip(as_tuple(outputs), shapes, strict=True)])

        def loss_of(parts: Sequence[Span]) -> Any:
            labels = batch.labels_of(0)
            if label_cuts is not None:
                labels = part_of(labels, label_cuts, Span(0, tokens, total))
            loss = MicroBatchLoss(self.loss_fn, labels, label_cuts, cuts, parts)
            for span in parts:
                part = outputs if span.is_whole else part_of(outputs, cuts, span)
                loss.add(
                    aliases(like(part, [t.detach().requires_grad_(t.is_floating_point()) for t in as_tuple(part)]))
                )
            return loss.value

        with torch.set_grad_enabled(self.trains):  # a loss may differentiate, as for a penalty of its gradient
            whole = loss_of([Span(0, tokens, tokens)])
            if label_cuts is not None:
                _check_sums(float(whole.detach()), float(loss_of(spans).detach()), as_tuple(outputs)[0].dtype)
        return whole

    def _set_dims(self, probes: dict[int, SequenceProbe]) -> None:
        for number, probe in probes.items():
            stage = self.runtime.stages[number]
            dims = probe.result()
            if self._is_last(stage):
                check_outputs(dims.outputs)
            stage.dims = dims

    def _through_stages(
        self, batch: StepBatch, spans: tuple[Span, ...], run: Callable[[Stage, Any, Span], Any]
    ) -> None:
        placement, links = self.runtime.placement, self.runtime.links
        units = [Unit(0, index) for index in range(len(spans))]
        row = [
            Action(Op.RECV_FORWARD, s, u) for s in self.runtime.stages if placement.receives_forward(s) for u in units
        ]
        # announced each time: a receive posted ahead would remain from a failed attempt
        attempt = object()
        links.begin(row, lambda unit: ((attempt, unit), None))
        handed: list[Any] = []
        for number in range(len(placement.stages)):
            error: Exception | None = None
            outputs: list[Any] = []
            stage = self.runtime.stages.get(number)
            if stage is not None:
                try:
                    # all messages are received before anything can fail
                    if number == 0:
                        handed = [batch.cut_inputs(0, span) for span in spans]
                    elif placement.receives_forward(number):
                        handed = [links.receive_forward(number, unit) for unit in units]
                    outputs = [self._run_unit(stage, *each, run) for each in zip(handed, spans, strict=True)]
                except PipelineStalled:
                    raise
                except Exception as problem:
                    error = problem
            self._agree(error, stage, batch)
            if stage is not None and placement.sends_forward(number):
                for unit, output in zip(units, outputs, strict=True):
                    links.send_forward(number, unit, output)
            handed = outputs
        links.finish()

    def _agree(self, error: Exception | None, stage: Stage | None, batch: StepBatch) -> None:
        """Raise any rank's error of a stage on every rank, as ConfigError; collective.

        Layers that ranks share run again only if all have failed: otherwise some wait in a collective of the layers.
        """
        shared = stage is not None and _sharing(stage.root) is not None
        failed, all_failed = self.consensus.failures(error, stage is not None, _PATIENCE_S if shared else None)
        if failed:
            if stage is not None and error is not None and not isinstance(error, ConfigError):
                problem, error = error, _failure(error, stage, batch, runs=all_failed or not shared)
                error.__cause__ = problem
            self.consensus.agree(error)

    def _run_unit(self, stage: Stage, inputs: Any, span: Span, run: Callable[[Stage, Any, Span], Any]) -> Any:
        with self._sharing_layers(stage):
            outputs = run(stage, inputs, span)
        if not self._is_last(stage):
            check_sendable(outputs, stage.layers.last)
            BoundarySpec.of(outputs).encode()  # check that it can be sent
        return outputs

    def _sharing_layers(self, stage: Stage) -> AbstractContextManager[None]:
        """Context manager around layers, which may wait for the ranks that share them."""
        if _sharing(stage.root) is None:
            return nullcontext()
        return self.consensus.watchdog.waiting("the ranks that share its layers", counts=False, bounded=False)

    def _gather(self, root: Any, value: Any) -> list[Any]:
        """Return a value of all ranks that share the layers of a stage; collective over these."""
        grid = _sharing(root)
        if grid is None:
            return [value]
        values: list[Any] = [None] * grid.get_slice_parallel_world_size()
        with self.consensus.watchdog.waiting("the ranks that share a layer to compare it"):
            torch.distributed.all_gather_object(values, value, group=grid.get_slice_parallel_group())
        return values

    def _is_last(self, stage: Stage) -> bool:
        return stage.number == len(self.runtime.placement.stages) - 1


def _sharing(root: Any) -> Any:
    """Return the grid of ranks that share the layers of a stage; None if each has its own."""
    grid = root.mpu() if hasattr(root, "mpu") else None
    return None if grid is None or grid.get_slice_parallel_world_size() == 1 else grid


def _check_sums(whole: float, sums: float, dtype: torch.dtype) -> None:
    # a sum whose terms cancel is rounding: the first loss of a policy is the mean of its advantages
    if abs(whole - sums) > 10 * TOLERANCE.get(dtype, 0.0) * max(abs(whole), abs(sums), _LEAST_LOSS):
        raise ConfigError(
            f"loss_fn: got {sums:.6g} from its token_sum / token_weight in slices, must be {whole:.6g} as from its call for the "
            'whole sequence, use a token_sum that adds up over any slices, "aligned" to shift labels, or a loss without it'
        )


def _check_alone(stage: Stage, inputs: Any, tokens: int, try_loss: Callable[[], Any], gather: Gather) -> None:
    """Refuse a loss that reads what layers keep beside their outputs: behind slices that is the last one's.

    A loss with a state of its own is another one in every call, behind the whole sequence too, and passes.
    """

    def found(runs: bool) -> list[Tensor]:
        with draws_kept():
            if runs:
                with stage.context.forward(Unit(0, 0), Span(0, tokens, tokens)):
                    stage.layers(copy_of(inputs))
            return [part.detach() for part in tensors_in(try_loss())]

    sliced, whole = found(False), found(True)
    same = _are_equal(sliced, whole)
    if all(gather(same)):
        return
    repeats = all(gather(_are_equal(whole, found(True))))
    if repeats and not same:
        raise ConfigError(
            f"loss_fn: got {_means(sliced)} once layers had run in slices and {_means(whole)} once they had run whole, for the "
            'same outputs and labels, must follow from these alone, use tensors that the layers hand on to it, or "slices": 1'
        )


def _means(parts: Sequence[Tensor]) -> str:
    return " and ".join(f"{float(part.double().mean()):.6g}" for part in parts)


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def _probe(stage: Stage, probe: SequenceProbe, inputs: Any, span: Span) -> Any:
    probe.begin_slice(span)
    with stage.context.forward(Unit(0, 0), span):
        inputs = stage.layers.received(inputs)
        for number, layer in enumerate(stage.layers.functions, start=stage.layers.first):
            probe.record(inputs)
            stage.context.enter_layer(number)
            inputs = layer(inputs)
    probe.record(inputs)
    return inputs


def _failure(problem: Exception, stage: Stage, batch: StepBatch, runs: bool) -> ConfigError:
    """Return the error for a stage that fails on a slice: of the model's cut or, if the first fails uncut, of its inputs.

    ``runs``: whether its layers may run: they must not if other ranks wait in one of their collectives.
    """
    total = batch.lengths[0]
    try:
        if runs and stage.number == 0:
            outputs = stage.layers.received(batch.cut_inputs(0, Span(0, total, total)))
            for layer in stage.layers.functions:
                outputs = layer(outputs)
    except Exception:
        return ConfigError(
            f"the data iterator: got inputs that the model fails with, cut or not, {one_line(problem)}; must fit its first "
            "layers, use (inputs, labels) with one sample per row"
        )
    return refuse_model(f"run on a slice it fails, {one_line(problem)}")
