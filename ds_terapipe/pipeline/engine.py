"""DeepSpeed's pipeline engine, running units of (micro-batch, slice) in the order of a schedule.

The engine decides nothing: it cuts a batch, asks for the schedule of that many slices and runs one method per action
(execution.py).
Optimiser step, gradient reduction, loss aggregation and checkpoints are DeepSpeed's own.
"""

from __future__ import annotations

import logging
import time
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from ds_terapipe.clipping import TrueNormClipping
from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.pipeline.accounting import LiveUnits, StepMemory
from ds_terapipe.pipeline.batch import StepBatch, read_step
from ds_terapipe.pipeline.channels import Channels
from ds_terapipe.pipeline.choosing import changed_settings, new_choice
from ds_terapipe.pipeline.context import SliceContext
from ds_terapipe.pipeline.control import Control, Header
from ds_terapipe.pipeline.evaluation import Evaluation
from ds_terapipe.pipeline.execution import ActionExecution
from ds_terapipe.pipeline.gradient_sums import GradientSums
from ds_terapipe.pipeline.gradients import SlicedGradients
from ds_terapipe.pipeline.host_memory import keep_freed_memory
from ds_terapipe.pipeline.inspection import Inspection
from ds_terapipe.pipeline.interception import Overrides, adapt_core_attention, adapt_parallel_linears, track_layers
from ds_terapipe.pipeline.layer_times import LayerTimes
from ds_terapipe.pipeline.layout import Layout
from ds_terapipe.pipeline.loss import MicroBatchLoss, check_loss, runs_per_slice
from ds_terapipe.pipeline.packed_weights import PackedWeights, is_available
from ds_terapipe.pipeline.plan import StepPlan, plan_step
from ds_terapipe.pipeline.report import StepReport, emit
from ds_terapipe.pipeline.stream import StreamMark
from ds_terapipe.pipeline.trace import Recorder, TraceFile
from ds_terapipe.pipeline.watch import Watch
from ds_terapipe.pipeline.weight_gradients import WeightGradients
from ds_terapipe.pipeline.wire import Wire
from ds_terapipe.plan.files import check_writable
from ds_terapipe.refusals import TOKEN_PIPELINE, check_checkpointing, check_config, check_model, cuts
from ds_terapipe.schedule import Op, Unit

logger = logging.getLogger(__name__)

PLAN_STATE = "ds_terapipe_plan"


class TokenPipelineEngine(Evaluation, ActionExecution, SlicedGradients, TrueNormClipping, PipelineEngine):
    """A :class:`PipelineEngine` whose pipeline carries slices of sequences. Same calls, same results.

    Args:
        token_pipeline: the block of the same name.
        *args, **kwargs: as for ``PipelineEngine``, which ``deepspeed.initialize`` passes.
    """

    def __init__(self, *args: Any, token_pipeline: TokenPipelineConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_pipeline = token_pipeline
        if token_pipeline.weight_gradients == "micro_batch" and self.torch_autocast_enabled():
            raise ConfigError(
                'token_pipeline.weight_gradients: got "micro_batch" beside torch_autocast, must be "slice" or "auto" (a layer '
                'multiplies with a copy of its weight, whose gradient is made with it), use "auto"'
            )
        self.is_pipe_partitioned = self.is_grad_partitioned = False  # boundaries are small already: slices
        if self.device.type == "cpu":
            keep_freed_memory()
        self._context = SliceContext()
        self._context.packed_weights = PackedWeights(self.packs_weights())
        self._adapted: list[str] = []
        self._intercepts, self._finalizer = False, lambda: None
        if cuts(token_pipeline.slices):
            self._intercept()
        ranks = [self.grid.stage_to_global(stage) for stage in range(self.num_stages)]
        new_mark = StreamMark if self.device.type == "cuda" else None
        self._watch = Watch(ranks, self.stage_id, token_pipeline.timeout_s, new_mark)
        weakref.finalize(self, self._watch.close)
        self._control = Control(self._watch, self.grid.pipe_groups, _hash_of(token_pipeline))
        self._channels = Channels(self.grid.pipe_groups, self._watch, self.device)
        self._trace = self._new_trace()
        self._recorder = Recorder(self.stage_id, self._watch, self._control.group, self.device)
        self._wire = Wire(ranks, self.stage_id, self._channels, self.device, self._watch)
        self._layout: Layout | None = None
        self._report = StepReport(self.num_stages)
        self._losses: dict[int, MicroBatchLoss] = {}
        self._inputs: dict[Unit, Any] = {}
        self._outputs: dict[Unit, Any] = {}
        self._outgoing: dict[Unit, Any] = {}
        self._gradients: dict[Unit, list[Tensor]] = {}
        self._live, self._memory = LiveUnits(), StepMemory()
        self._weight_gradients = WeightGradients()
        self._gradient_sums = GradientSums(self.module.parameters())
        self._layer_times = LayerTimes(self.module, self.device)
        self._choice = new_choice(self, self._control, self._memory, self._layer_times)

    def _intercept(self) -> None:
        """Intercept attention and linear layers; where nothing is cut, they and the compiler are left alone."""
        self._intercepts = True
        self._adapted = adapt_core_attention(self.module)
        track_layers(self.module, self._context)
        adapt_parallel_linears(self.module)
        Overrides.acquire()
        self._finalizer = weakref.finalize(self, Overrides.release)

    def _new_trace(self) -> TraceFile:
        settings = self.token_pipeline
        path = settings.trace_path
        if path is not None:
            self._control.decide(lambda: check_writable("token_pipeline.trace_path", path, "e.g. trace.json"))
        about = {"schedule": settings.schedule, "slices": settings.slices, "stages": self.num_stages}
        steps = None if settings.trace_steps is None else (settings.trace_steps[0], settings.trace_steps[1])
        trace = TraceFile(settings.trace_path, steps, about)
        weakref.finalize(self, trace.close)
        return trace

    @property
    def token_pipeline(self) -> TokenPipelineConfig:
        """The block of this name as it stands now. Read-only, its fields too: :meth:`set_slices` changes how steps are cut."""
        return self._token_pipeline

    @token_pipeline.setter
    def token_pipeline(self, value: object) -> None:
        raise ConfigError("engine.token_pipeline: got an assignment, must stay as it is, use engine.set_slices(...)")

    def set_slices(self, slices: int | Sequence[int] | str, schedule: str | None = None) -> None:
        """Cut in another way from the next step on; collective: every rank calls it, between steps, with the same values.

        Args:
            slices: as ``token_pipeline.slices``; ``"auto"`` measures and plans anew.
            schedule: as ``token_pipeline.schedule``; None keeps it.

        Raises:
            ConfigError: a value that breaks its rule, or other values on another rank; on every rank, and all stays as it was.
        """
        self._refuse_broken()
        settings, before = changed_settings(self._token_pipeline, slices, schedule, self._control), self._token_pipeline
        if cuts(settings.slices):
            self._control.agree(self._uncut_only(settings))
            if not self._intercepts:
                self._intercept()
        self._token_pipeline = settings
        try:
            self._choice = new_choice(self, self._control, self._memory, self._layer_times)
        except BaseException:
            self._token_pipeline = before
            raise
        self._control.config_hash = _hash_of(settings)
        self._trace.describe(slices=settings.slices, schedule=settings.schedule)

    def _uncut_only(self, settings: TokenPipelineConfig) -> ConfigError | None:
        """What of this engine goes with it only as long as nothing is cut."""
        try:
            check_config({**self._config._param_dict, TOKEN_PIPELINE: settings.model_dump()})
            check_model(self.module)
        except ConfigError as error:
            return error
        return None

    @property
    def slices_run(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of the slices that this stage really ran in the last step, an evaluation too, by micro-batch and in order."""
        return self._live.slices()

    @property
    def units_run(self) -> tuple[int, int]:
        """How many slices of micro-batches this stage ran in the last step: forward, and backward (0 in an evaluation)."""
        return self._live.forward_units, self._live.backward_units

    @property
    def peak_live_units(self) -> int:
        """Most units of the last step that were live at once on this stage: run forward and not yet backward."""
        return self._live.peak_units

    @property
    def peak_live_tokens(self) -> int:
        """As :attr:`peak_live_units`, in tokens of a sequence."""
        return self._live.peak_tokens

    @property
    def packed_weights_bytes(self) -> int:
        """What packed weights take on this stage, see ``token_pipeline.pack_weights``; known after the first step."""
        return self._context.packed_weights.most_bytes

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As ``PipelineEngine.save_checkpoint``; the plan of ``"slices": "auto"`` goes with it."""
        self._refuse_broken()
        state = self._choice.state()
        client_state = {**(client_state or {}), **({PLAN_STATE: state} if state else {})}
        return super().save_checkpoint(save_dir, tag, client_state, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As ``PipelineEngine.load_checkpoint``; a plan that is in the checkpoint is used again."""
        path, client_state = super().load_checkpoint(*args, **kwargs)
        if client_state:
            self._choice.load(client_state.pop(PLAN_STATE, None))
        return path, client_state

    def destroy(self) -> None:
        """Free DeepSpeed's resources and undo the interception of attention."""
        self._context.packed_weights = PackedWeights(wanted=False)
        self._trace.close()
        self._watch.close()
        if not self._watch.ended:  # else messages may still be on their way, and who they are for may be gone
            self._channels.close()
        self._finalizer()
        super().destroy()
        self._watch.ended = self._watch.ended or "destroy() was called"

    # ----------------------------------------------------------------------------------------------------------- train

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimiser step on the next ``gradient_accumulation_steps`` micro-batches; as ``PipelineEngine.train_batch``.

        Returns the mean loss. Raises ConfigError on every rank for data or a model that can't be cut, ``PipelineStalled``
        when another stage does not answer. After an error in the middle of a step the engine is no longer usable, and the
        next call says so; one that was found before the step began leaves it as it was.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        self._refuse_broken()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self._compute_loss = True
        self.total_loss = self.total_additional_losses = None
        started = time.perf_counter()
        batch = self._next_step(self.micro_batches)
        cutting = self._choice.cutting(batch.lengths, batch.everywhere)
        batch.cut(cutting.slices)
        self._inspect(batch)
        once = self.makes_weight_gradients_once()
        self._context.weight_gradients = self._weight_gradients if once else None
        if once:
            cut = [span.length for spans in batch.spans for span in spans if not span.is_whole]
            self._context.packed_weights.begin(cut)
        plan = plan_step(cutting.schedule, self.num_stages, batch.slice_counts(), once)
        step = self.global_steps + 1
        traced = self._trace.wants(step)
        self._recorder.begin(step, wanted=traced or self._choice.wants_events)
        with self._no_way_back():
            with self._layer_times.step(self._choice.wants_layers):
                self._run(batch, plan, self.global_steps)
            self._finish_step()
        seconds = time.perf_counter() - started
        events = self._recorder.end()
        if traced:
            self._trace.add(step, events, self._recorder.cost_of_one())
        self._log_step(batch, cutting.schedule, seconds)
        self._choice.took(events, seconds)
        return self.agg_train_loss

    def _finish_step(self) -> None:
        """What comes after the schedule: gradients reduced, weights updated, the loss known on all stages."""
        with self._collective("tied gradients", "the all-reduce of tied gradients"):
            self._exec_reduce_tied_grads()
        with self._collective("gradients", "the all-reduce of gradients over data-parallel replicas"):
            self._exec_reduce_grads()
        with self._collective("optimiser", "the optimiser step of the other ranks", counts=False):
            self._exec_optimizer_step()
        with self._collective("loss", "the loss from the last stage"), torch.no_grad():
            self.agg_train_loss = self._aggregate_total_loss()

    @contextmanager
    def _no_way_back(self) -> Iterator[None]:
        """Around what leaves messages, half a gradient or half a step behind when it fails."""
        try:
            yield
        except BaseException as error:
            self._watch.failed(error)
            raise

    def _refuse_broken(self) -> None:
        if self._watch.ended:
            raise RuntimeError(
                f"this engine is no longer usable ({self._watch.ended}): a step that did not come to its end leaves messages and "
                "gradients in no known state; end the processes, start anew and load the last checkpoint"
            )

    @contextmanager
    def _collective(self, name: str, waited_for: str, counts: bool = True) -> Iterator[None]:
        with self._recorder.collective(name), self._watch.waiting(waited_for, counts=counts):
            yield

    # -------------------------------------------------------------------------------------------------------- one step

    def _next_step(self, micro_batches: int) -> StepBatch:
        """Fetch all micro-batches of a step and agree with all ranks that it can start."""
        error: BaseException | None = None
        batch = StepBatch()
        self._watch.begin(self.global_steps, ())
        try:
            check_checkpointing(self.token_pipeline.slices)
            if self.is_first_stage() or self.is_last_stage():
                pulled = [self._next_batch() for _ in range(micro_batches)]
                batch = read_step(
                    pulled,
                    self.token_pipeline,
                    self.device,
                    inputs=self.is_first_stage(),
                    labels=self.is_last_stage(),
                    cut_labels=self._compute_loss and runs_per_slice(self.module.loss_fn),
                )
        except Exception as problem:  # whatever the user's data raises is raised on every rank
            error = problem
        header = Header(tuple(batch.lengths), tuple(batch.signatures)) if batch.lengths else None
        header = self._control.announce(header, micro_batches, error)
        batch.adopt(header)
        return batch

    def _inspect(self, batch: StepBatch) -> None:
        """Before the first sliced step: where the sequence is between layers, and whether the model can be cut at all."""
        if self._layout is not None or all(len(spans) == 1 for spans in batch.spans):
            return
        check_loss(self.module.loss_fn)
        inspection = Inspection(
            self.module, self._context, self._wire, self._control, self.token_pipeline, self._adapted, self._autocast,
            self.stage_id, self.num_stages, self._compute_loss,
        )  # fmt: skip
        self._layout = inspection.run(batch)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        with autocast_if_enabled(self):
            yield

    def _run(self, batch: StepBatch, plan: StepPlan, step: int) -> None:
        """Execute this stage's row of the schedule."""
        row = plan.grid[self.stage_id]
        self._batch = batch
        self.fwd_outputs: list[Any] = []
        training = torch.is_grad_enabled()
        self._live.begin()
        self._watch.begin(step, plan.grid)
        self._wire.begin(
            plan.units(Op.RECV_FORWARD, self.stage_id),
            plan.units(Op.RECV_BACKWARD, self.stage_id),
            self._shape_of(batch, training),
        )
        try:
            execute = self._recorder.recording(self._layer_times.recording(self._execute))
            for index, action in enumerate(row):
                self._watch.at(index)
                self._pack_weights(action.op)
                execute(action)
            self._watch.at(len(row))
            self._wire.finish()
        except BaseException:
            self._weight_gradients.clear()
            self._gradient_sums.clear()
            raise
        finally:
            for leftover in (self._losses, self._inputs, self._outputs, self._outgoing, self._gradients):
                leftover.clear()
            self._batch = StepBatch()  # its inputs and labels are no longer needed
            self._context.clear()
            self._context.weight_gradients = None
            self._context.packed_weights.end()

    def _shape_of(self, batch: StepBatch, training: bool) -> Callable[[Unit], Hashable]:
        signatures, spans = batch.signatures, batch.spans  # and not the batch: links keep what they are given here
        return lambda unit: (signatures[unit.micro_batch], spans[unit.micro_batch], unit.slice, training)

    def makes_weight_gradients_once(self) -> bool:
        """Per micro-batch or per slice: a user who checkpoints activations is short of the memory that the former takes.

        Under ``torch_autocast`` a layer multiplies with a copy of its weight, whose gradient is autograd's to make.
        """
        choice = self.token_pipeline.weight_gradients
        if choice == "auto":
            return self.module.activation_checkpoint_interval == 0 and not self.torch_autocast_enabled()
        return choice == "micro_batch"

    def packs_weights(self) -> bool:
        """Whether weights of 32 bits are packed, see ``token_pipeline.pack_weights``."""
        wanted = self.token_pipeline.pack_weights and self.makes_weight_gradients_once()
        return wanted and self.device.type == "cpu" and is_available()

    # ------------------------------------------------------------------------------------------------- around DeepSpeed

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As ``DeepSpeedEngine.compile`` where nothing is cut; a graph would keep the position of the slice it was made for."""
        if cuts(self.token_pipeline.slices):
            got = shown(self.token_pipeline.slices)
            raise ConfigError(
                f'engine.compile(): got "slices": {got}, must be 1 (nothing is cut), use 1 or train uncompiled'
            )
        super().compile(*args, **kwargs)
        if self._is_compiled_autograd_enabled and self.global_rank == 0:
            logger.warning("engine.compile(): compiled_autograd_enabled does nothing with token_pipeline, leave it out")

    def _log_step(self, batch: StepBatch, schedule: str, seconds: float) -> None:
        waited, clock = self._watch.waited_s, self._wire.clock
        # where there are streams no message holds the host, and reading what the stream waited makes it wait for the stream
        if clock is not None:
            waited = clock.take_s() if self._printing() else 0.0
        self._report.add(sum(batch.lengths) * self.micro_batch_size * self.dp_world_size, seconds, waited)
        if self._printing():
            shares = self._control.collect(self._report.waited_share)
            by_stage = [shares[self.grid.stage_to_global(stage)] for stage in range(self.num_stages)]
            line = self._report.line(self.global_steps, self.agg_train_loss, batch, schedule, by_stage)
            if self.global_rank == 0:
                emit(line)
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events(
                [("Train/Samples/train_loss", self.agg_train_loss.mean().item(), self.global_samples)]
            )

    def _printing(self) -> bool:
        every = self.steps_per_print()
        return every is not None and self.global_steps % every == 0


def _hash_of(settings: TokenPipelineConfig) -> int:
    """Of what must be the same on all ranks."""
    return zlib.crc32(repr(sorted(settings.model_dump().items())).encode())
