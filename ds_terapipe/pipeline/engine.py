"""DeepSpeed's pipeline engine, running units of (micro-batch, slice) in the order of a schedule.

The engine cuts a batch, gets the schedule for that many slices and lets its runtime run it (runtime.py). It keeps all
state that outlives a placement of the stages. Optimiser step, gradient reduction, loss aggregation and checkpoints are
DeepSpeed's own.
"""

from __future__ import annotations

import logging
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from ds_terapipe.clipping import TrueNormClipping, counting_nothing
from ds_terapipe.config import TOKEN_PIPELINE, TokenPipelineConfig
from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.pipeline.autotune.engine_facts import changed_settings, new_slicer
from ds_terapipe.pipeline.autotune.layer_times import LayerTimes
from ds_terapipe.pipeline.batch import StepBatch, own, read_step
from ds_terapipe.pipeline.checkpoints import Checkpoints
from ds_terapipe.pipeline.evaluation import evaluate
from ds_terapipe.pipeline.gradients import DeepSpeedGradients, all_reduce_in_place, reduce_replicas, reduce_tied
from ds_terapipe.pipeline.inspection.first_batch import Inspection
from ds_terapipe.pipeline.loss import StepLosses, check_loss, runs_per_slice
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.operators.interception import not_deferred_line
from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from ds_terapipe.pipeline.parameter_groups import arrange, occupy, refuse_switched, unused
from ds_terapipe.pipeline.placing import placement_of
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.recording.accounting import new_memory
from ds_terapipe.pipeline.recording.report import StepReport, emit, log_step
from ds_terapipe.pipeline.recording.trace import Recorder, new_trace
from ds_terapipe.pipeline.runtime import PipelineRuntime, Step
from ds_terapipe.pipeline.shared_weights import refuse_split, shared_weights
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.pipeline.step_grid import grid_of_step
from ds_terapipe.pipeline.teardown import close_module, detach_engine
from ds_terapipe.pipeline.transport.consensus import Consensus, Header
from ds_terapipe.pipeline.transport.stream import Loader, StreamMark
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.process_groups import close_groups, gathered
from ds_terapipe.refusals import check_checkpointing, check_config, check_model, cuts
from ds_terapipe.schedule import Grid, Placement

logger = logging.getLogger(__name__)

_DESTROYED = "destroy() was called"


class TokenPipelineEngine(Checkpoints, TrueNormClipping, PipelineEngine):
    """A :class:`PipelineEngine` whose pipeline carries slices of sequences. Same calls, same results.

    Args:
        token_pipeline: the block ``token_pipeline``.
        *args, **kwargs: as for ``PipelineEngine``, which ``deepspeed.initialize`` passes.

    Attributes:
        observers: :class:`Observer` objects that are called in every step and evaluation from the next one on.
    """

    _streams: RandomStreams | None = None  # None: layers use the process's own random state
    _followed = False  # whether the micro-batch size has changed since the start
    _verified = False  # whether all layers were verified, on any rank; holds after moves too

    def __init__(self, *args: Any, token_pipeline: TokenPipelineConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_pipeline = token_pipeline
        check_weight_gradients(token_pipeline, self.torch_autocast_enabled())
        pipelines = self.grid.pipe_groups
        view = RankView.of(Placement.plain(self.num_stages), self.global_rank, pipelines)
        new_mark = StreamMark if self.device.type == "cuda" else None
        self._watchdog = Watchdog(view, token_pipeline.timeout_s, new_mark, self.device)
        weakref.finalize(self, self._watchdog.close)
        self._consensus = Consensus(self._watchdog, pipelines, _hash_of(token_pipeline))
        self._shared = shared_weights(self.module, self._consensus)
        refuse_split(self._shared, self.module.parts, "model")
        self._trace = new_trace(token_pipeline, self.num_stages, self._consensus)
        weakref.finalize(self, self._trace.close)
        self._memory, self._load = new_memory(self.device), Loader(self.device)
        self.observers: list[Observer] = []
        self._recorder = Recorder(self.stage_id, self._watchdog, self._consensus.group, self.device)
        self._build_runtime()

    def _build_runtime(self) -> None:
        """Make everything that depends on the placement of the layers and on which of them train; collective."""
        self.is_pipe_partitioned = self.is_grad_partitioned = False  # boundaries are small already: slices
        self._recorder.stage = self.stage_id
        self._report = StepReport(self.num_stages)
        self._rules = DeepSpeedGradients(self)
        self._runtime = self._build_stages(placement_of(self.module, self._consensus))
        self._watchdog.begin(self.global_steps, (), self._runtime.view)
        self._switches = [(name, p, p.requires_grad) for name, p in self.module.named_parameters()]
        self._layer_times = LayerTimes([stage.layers for stage in self._runtime.stages.values()], self.device)
        self._begin_slicing()

    def _begin_slicing(self) -> None:
        """Reset the slice plans of steps; collective."""
        self._slicer = new_slicer(self, self._slice_settings(), self._consensus, self._memory, self._layer_times)
        self._cut_for = self.train_micro_batch_size_per_gpu()

    def _slice_settings(self) -> TokenPipelineConfig:
        """Return the settings; a plan and a file of measurements only hold for the micro-batches of the start."""
        settings: TokenPipelineConfig = self._token_pipeline
        if self._followed:
            settings = settings.model_copy(update={"plan_path": None, "measurements_path": None})
        return settings

    def _follow_micro_batch(self) -> None:
        """Drop measurements if the micro-batch size has changed; collective."""
        if self.train_micro_batch_size_per_gpu() == self._cut_for:
            return
        if self.global_rank == 0 and self._slicer.state():
            emit(f"plan: a micro-batch has {self.train_micro_batch_size_per_gpu()} sequences now, not {self._cut_for}")
        self._followed = True
        self._begin_slicing()

    def _build_stages(self, placement: Placement) -> PipelineRuntime:
        """Build this rank's stages on a placement; if nothing is cut, nothing is intercepted."""
        runtime = PipelineRuntime.build(
            placement,
            self.grid.pipe_groups,
            dict(enumerate(self.module.forward_funcs, start=self.module._local_start)),
            device=self.device,
            watchdog=self._watchdog,
            gradients=self._rules,
            module=self.module,
            memory=self._memory,
            autocast=partial(_autocast, weakref.ref(self)),
            streams=self._streams,
            first_stage=self._first_stage(placement),
            host_group=self._consensus.group,
        )
        if cuts(self.token_pipeline.slices):
            runtime.intercept()
        return runtime

    def _first_stage(self, placement: Placement) -> Callable[..., Stage]:
        """Factory of the model's first stage; called on every rank."""
        return Stage

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Make the optimizer; a stage that trains nothing passes an unused parameter."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            model_parameters = [unused(self.module, self.device, self.param_names)]
        super()._configure_optimizer(client_optimizer, model_parameters)
        if isinstance(self.optimizer, BF16_Optimizer):
            counting_nothing(self.optimizer)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Choose the optimizer's wrapper; wrappers get the same groups on all ranks, none of them empty."""
        kind = super()._do_optimizer_sanity_check(basic_optimizer)
        self._arrange_groups(basic_optimizer, kind)
        if kind is not None:
            occupy(basic_optimizer, self.module, self.device, self.param_names)
        return kind

    def _arrange_groups(self, optimizer: Any, kind: str | None) -> None:
        """Arrange the parameter groups for DeepSpeed's wrapper ``kind``, None without one; collective."""
        if kind is not None:
            gather = partial(gathered, group=self.module.world_group)
            arrange(optimizer, kind, self.module, self.param_names, self.client_lr_scheduler, gather)

    @property
    def token_pipeline(self) -> TokenPipelineConfig:
        """The present block ``token_pipeline``. Read-only, its fields too; use :meth:`set_slices`."""
        return self._token_pipeline

    @token_pipeline.setter
    def token_pipeline(self, value: object) -> None:
        raise ConfigError("engine.token_pipeline: got an assignment, must stay as it is, use engine.set_slices(...)")

    def set_slices(self, slices: int | Sequence[int] | str, schedule: str | None = None) -> None:
        """Change the slices from the next step on; collective: every rank calls it between steps, with the same values.

        Args:
            slices: as ``token_pipeline.slices``; ``"auto"`` measures and plans again.
            schedule: as ``token_pipeline.schedule``; None keeps it.

        Raises:
            ConfigError: on every rank, for an invalid value, or different values between ranks; nothing is changed.
        """
        self._refuse_broken()
        before = self._token_pipeline
        settings = changed_settings(before, slices, schedule, self._consensus)
        if cuts(settings.slices):
            self._consensus.agree(self._uncut_only(settings))
            self._runtime.intercept()
        self._token_pipeline = settings
        try:
            self._begin_slicing()
        except BaseException:
            self._token_pipeline = before
            raise
        self._consensus.config_hash = _hash_of(settings)
        self._trace.describe(slices=settings.slices, schedule=settings.schedule)

    def _uncut_only(self, settings: TokenPipelineConfig) -> ConfigError | None:
        """Return the error for settings of this engine that only work while nothing is cut; None if there is none."""
        try:
            check_config({**self._config._param_dict, TOKEN_PIPELINE: settings.model_dump()})
            check_model(self.module)
        except ConfigError as error:
            return error
        return None

    @property
    def placement(self) -> Placement:
        """Placement of the model's stages."""
        return self._runtime.placement

    @property
    def slices_run(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of the slices that this stage ran in the last step or evaluation, by micro-batch and in order."""
        return self._runtime.live.slices()

    @property
    def units_run(self) -> tuple[int, int]:
        """Numbers of units that this stage ran in the last step: forward, and backward (0 in an evaluation)."""
        return self._runtime.live.forward_units, self._runtime.live.backward_units

    @property
    def peak_live_units(self) -> int:
        """Largest number of live units on this stage in the last step: run forward and not yet backward."""
        return self._runtime.live.peak_units

    @property
    def peak_live_tokens(self) -> int:
        """:attr:`peak_live_units`, in tokens of a sequence."""
        return self._runtime.live.peak_tokens

    def destroy(self) -> None:
        """Release the process groups, threads and hooks of this engine and its module; collective.

        The module keeps its weights and cannot train any more, see ``teardown.py``. After a failed step the groups stay:
        messages may still be in flight, and their receivers may be gone.
        """
        if not self._watchdog.ended:
            with self._watchdog.waiting("all ranks to close their process groups"):
                self._runtime.close()
                close_groups([self._consensus.group], self._consensus, self._recorder)
                close_module(self.module, self, self.optimizer)
        self._release()
        super().destroy()
        self._watchdog.ended = self._watchdog.ended or _DESTROYED

    def __del__(self) -> None:
        # A destroyed ZeRO would wait for the device once more, where another engine's receives may wait for what this rank
        # has yet to send: garbage is collected at any time.
        ended = getattr(getattr(self, "_watchdog", None), "ended", None)
        for undo in (self._release,) if ended else (self._release, super().destroy):
            with suppress(Exception):  # for an engine whose constructor failed
                undo()

    def _release(self) -> None:
        """Release this process's resources without collectives: each rank collects garbage at its own time."""
        self._trace.close()
        self._watchdog.close()
        self._runtime.leave()
        detach_engine(self)

    # ----------------------------------------------------------------------------------------------------------- train

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimiser step on the next ``gradient_accumulation_steps`` micro-batches.

        Returns the mean loss. Raises ConfigError on every rank for data or a model that cannot be cut,
        ``PipelineStalled`` if another stage does not answer. After an error in the middle of a step the engine is
        unusable, and further calls raise RuntimeError. An error before the step began leaves the engine as it was.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        self._refuse_broken()
        if self.placement.forward_only == len(self.placement.stages):
            raise ConfigError(
                "model: got no parameter that is trained, must have one on some stage, use requires_grad_() or eval_batch()"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._enter_training()
        self._compute_loss = True
        self.total_loss = self.total_additional_losses = None
        started = time.perf_counter()
        batch = self._next_step(self.micro_batches)
        self._follow_micro_batch()
        plan = self._slicer.plan(batch.lengths, batch.everywhere)
        batch.cut(plan.slices)
        self._inspect(batch)
        counts = batch.slice_counts()
        grid = grid_of_step(plan.schedule, self.placement, counts, self._deferring() if max(counts) > 1 else ())
        step = self.global_steps + 1
        traced = self._trace.wants(step)
        self._recorder.begin(step, wanted=traced or self._slicer.wants_events)
        with self._poison_on_error():
            with self._layer_times.step(self._times_layers()):
                self._run(batch, grid, self.global_steps)
            self._finish_step()
        if self._slicer.wants_seconds:
            self._wait_for_device()
        seconds = time.perf_counter() - started
        events = self._recorder.end()
        if traced:
            self._trace.add(step, events, self._recorder.cost_of_one())
        log_step(self, self._report, batch, plan.schedule, seconds)
        self._slicer.record_step(events, seconds)
        mean: Tensor = self.agg_train_loss
        return mean

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate one batch without gradients; arguments and result see ``PipelineEngine.eval_batch``."""
        self._refuse_broken()
        return evaluate(self, data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches)

    def _enter_training(self) -> None:
        self.module.train()

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _times_layers(self) -> bool:
        return self._slicer.wants_layers

    def _finish_step(self) -> None:
        """Finish a step after its schedule: reduce gradients, update weights, bring the loss to all stages."""
        with self._collective("tied gradients", "the all-reduce of tied gradients"):
            self._exec_reduce_tied_grads()
        with self._collective("gradients", "the all-reduce of gradients over data-parallel replicas"):
            self._exec_reduce_grads()
        with self._collective("optimiser", "the optimiser step of the other ranks", counts=False):
            self._exec_optimizer_step()
        with self._collective("loss", "the loss from the last stage"), torch.no_grad():
            self.agg_train_loss = self._aggregate_total_loss()

    def _exec_reduce_tied_grads(self) -> None:
        reduce_tied(self, super()._exec_reduce_tied_grads)

    def _exec_reduce_grads(self) -> None:
        reduce_replicas(self, super()._exec_reduce_grads)

    def allreduce_no_retain(self, bucket: list[Tensor], dp_group: Any, *args: Any, **kwargs: Any) -> None:
        """Override ``DeepSpeedEngine.allreduce_no_retain``: reduce large gradients in place."""
        reduce, world_size = (
            super().allreduce_no_retain,
            kwargs.get("dp_world_size") or torch.distributed.get_world_size(dp_group),
        )
        all_reduce_in_place(self, bucket, dp_group, world_size, lambda small: reduce(small, dp_group, *args, **kwargs))

    @contextmanager
    def _poison_on_error(self) -> Iterator[None]:
        """Context manager for code that leaves messages, partial gradients or a partial step behind when it fails."""
        try:
            yield
        except BaseException as error:
            self._watchdog.failed(error)
            raise

    def _refuse_broken(self) -> None:
        if self._watchdog.ended == _DESTROYED:
            raise RuntimeError(
                f"this engine is no longer usable ({_DESTROYED}): build another one, on a module of its own"
            )
        if self._watchdog.ended:
            raise RuntimeError(
                f"this engine is no longer usable ({self._watchdog.ended}): a step that did not come to its end leaves messages "
                "and gradients in no known state; end the processes, start anew and load the last checkpoint"
            )

    @contextmanager
    def _collective(self, name: str, waited_for: str, counts: bool = True) -> Iterator[None]:
        with self._recorder.collective(name), self._watchdog.waiting(waited_for, counts=counts):
            yield

    # -------------------------------------------------------------------------------------------------------- one step

    def _next_step(self, micro_batches: int) -> StepBatch:
        """Fetch all micro-batches of a step and agree with all ranks that it can start."""
        error: BaseException | None = None
        batch, view, weight, weighs = StepBatch(), self._runtime.view, None, None
        self._watchdog.begin(self.global_steps, (), view)
        try:
            check_checkpointing(self.token_pipeline.slices)
            if torch.is_grad_enabled() and self.optimizer is None:
                raise ConfigError(
                    "optimizer: got none on a rank that trains, must be one on every rank, also where a stage has nothing to "
                    "train, use torch.optim.AdamW(model.parameters()) or an optimizer in the configuration"
                )
            if torch.is_grad_enabled():
                forward = (stage for stage in self._runtime.stages.values() if not stage.trains)
                layers = (layer for stage in forward for layer in stage.layers.modules)
                refuse_switched(self._switches, self.basic_optimizer, self.optimizer, layers)
            pulled = self._read(micro_batches)
            if view.has_first or view.has_last:
                batch = read_step(
                    pulled,
                    self.token_pipeline,
                    self._load,
                    inputs=view.has_first,
                    labels=view.has_last,
                    cut_labels=self._compute_loss and runs_per_slice(self.module.loss_fn),
                )
                if view.has_last and self._compute_loss and hasattr(self.module.loss_fn, "step_weight"):
                    weight = self.module.loss_fn.step_weight(batch.labels)
                    weight, weighs = None if weight is None else weight.to(self.device), weight is not None
        except Exception as problem:  # any error of the user's data is raised on every rank
            error = problem
        header = Header(tuple(batch.lengths), tuple(batch.signatures)) if batch.lengths else None
        batch.adopt(self._consensus.announce(view.placement, header, micro_batches, error, weighs))
        if weight is not None:
            with self._watchdog.waiting("the number of labels of the other replicas", counts=False):
                torch.distributed.all_reduce(weight, group=self.grid.get_data_parallel_group())
            self.module.loss_fn.begin_step(weight / self.dp_world_size)
        return batch

    def _read(self, micro_batches: int) -> list[Any]:
        """Read the micro-batches of a step, (inputs, labels) each, if this rank needs them."""
        view = self._runtime.view
        return [self._next_batch() for _ in range(micro_batches)] if view.has_first or view.has_last else []

    def _next_batch(self) -> Any:
        """Copy the iterator's next item: all of a step's micro-batches are read before the first one runs."""
        return own(super()._next_batch())

    def _inspect(self, batch: StepBatch) -> None:
        """Find the sequence dimensions before the first sliced step, and verify the slices; collective."""
        if self._runtime.is_inspected or all(len(spans) == 1 for spans in batch.spans):
            return
        check_loss(self.module.loss_fn)
        loss_fn = self.module.loss_fn if self._compute_loss else None
        verifies = self.token_pipeline.verify and not self._verified
        Inspection(self._runtime, self._consensus, self.token_pipeline, verifies, loss_fn).run(batch)
        self._verified = True
        names = {name for of_rank in self._consensus.gather(self.not_deferred) for name in of_rank}
        if names and self.global_rank == 0:
            emit(not_deferred_line(sorted(names)))

    def _run(self, batch: StepBatch, grid: Grid, step: int) -> None:
        """Execute this rank's row of the schedule."""
        losses, runtime = None, self._runtime
        if runtime.view.has_last:
            loss_fn, output_cuts = self.module.loss_fn if self._compute_loss else None, runtime.output_cuts
            losses = StepLosses(
                batch, loss_fn, output_cuts, keep_outputs=self.eval_return_logits, sums=self._compute_loss
            )
        try:
            runtime.run(
                Step(step, batch, grid, losses, self.grid.data_parallel_id * len(batch.spans)),
                [*self.observers, self._recorder, self._layer_times],
            )
        except BaseException:
            self._rules.clear()
            raise
        self.fwd_outputs: list[Any] = [] if losses is None else losses.values
        if losses is not None:
            self.total_loss = losses.total
            if self.eval_return_logits:
                self.outputs = losses.outputs
            if torch.is_grad_enabled():
                self.loss = losses.values[-1]

    def _deferring(self) -> tuple[int, ...]:
        """Return the stages with separate weight gradients, once per micro-batch; the same on all ranks."""
        return self._runtime.deferring(self._consensus) if self.makes_weight_gradients_once() else ()

    @property
    def not_deferred(self) -> list[str]:
        """Names of this rank's trained matrices whose gradients are made slice by slice against the setting."""
        interception = self._runtime.interception
        if interception is None or not self.makes_weight_gradients_once():
            return []
        return interception.not_deferred(self.module.named_parameters())

    def makes_weight_gradients_once(self) -> bool:
        """Whether weight gradients are made per micro-batch; "auto": not with activation checkpointing, to save memory.

        Under ``torch_autocast`` a layer multiplies with a copy of its weight, whose gradient autograd has to make.
        """
        choice = self.token_pipeline.weight_gradients
        if choice == "auto":
            return self.module.activation_checkpoint_interval == 0 and not self.torch_autocast_enabled()
        return choice == "micro_batch"

    # ------------------------------------------------------------------------------------------------- around DeepSpeed

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Override ``DeepSpeedEngine.compile``: refuse slices, since a graph would keep the position of its slice."""
        if cuts(self.token_pipeline.slices):
            got = shown(self.token_pipeline.slices)
            raise ConfigError(
                f'engine.compile(): got "slices": {got}, must be 1 (nothing is cut), use 1 or train uncompiled'
            )
        super().compile(*args, **kwargs)
        if self._is_compiled_autograd_enabled and self.global_rank == 0:
            logger.warning("engine.compile(): compiled_autograd_enabled does nothing in a pipeline, leave it out")


def check_weight_gradients(token_pipeline: TokenPipelineConfig, autocast: bool) -> None:
    """Raise ConfigError for weight gradients per micro-batch beside ``torch_autocast``."""
    if token_pipeline.weight_gradients == "micro_batch" and autocast:
        raise ConfigError(
            'token_pipeline.weight_gradients: got "micro_batch" beside torch_autocast, must be "slice" or "auto" (a layer '
            'multiplies with a copy of its weight, whose gradient is made with it), use "auto"'
        )


def _autocast(engine: weakref.ref[Any]) -> Any:
    """Return the mixed precision context of an engine, by a weak reference."""
    return autocast_if_enabled(engine())


def _hash_of(settings: TokenPipelineConfig) -> int:
    """Hash the settings, which must be the same on all ranks."""
    return zlib.crc32(repr(sorted(settings.model_dump().items())).encode())
