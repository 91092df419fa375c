"""DeepSpeed's pipeline engine, running units of (micro-batch, slice) in the order of a schedule.

The engine owns its parts and overrides the methods of DeepSpeed's engine with lines that hand over to them. Optimiser
step, gradient reduction, loss aggregation and checkpoint files are DeepSpeed's own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from ds_terapipe.bf16_parts import LoadArguments
from ds_terapipe.clipping import clip_by_true_norm, counting_nothing
from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.deepspeed_state import link_sums
from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.loss_scaling import taking_no_step
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.autotune.engine_facts import new_slicer
from ds_terapipe.pipeline.clock import Clock
from ds_terapipe.pipeline.controller import Controller
from ds_terapipe.pipeline.ended import DESTROYED, refuse_ended
from ds_terapipe.pipeline.ends import follow_places
from ds_terapipe.pipeline.evaluation import evaluate
from ds_terapipe.pipeline.gradients import DeepSpeedGradients, reduce_tied
from ds_terapipe.pipeline.loss_state import keep_loss_state
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.operators.interception import has_hooks
from ds_terapipe.pipeline.parameter_groups import occupy, unused
from ds_terapipe.pipeline.placing import placement_of
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.recording.accounting import new_memory
from ds_terapipe.pipeline.recording.layer_times import LayerTimes
from ds_terapipe.pipeline.recording.report import StepReport
from ds_terapipe.pipeline.recording.trace import Recorder, new_trace
from ds_terapipe.pipeline.replicas import ReplicaGradients, broadcasting_scalars, follow_replicas
from ds_terapipe.pipeline.resuming import resuming
from ds_terapipe.pipeline.runtime import PipelineRuntime
from ds_terapipe.pipeline.set_slices import hash_of, set_slices
from ds_terapipe.pipeline.shared_weights import refuse_split, shared_weights
from ds_terapipe.pipeline.step_runner import StepRunner
from ds_terapipe.pipeline.teardown import close_engine, detach_engine
from ds_terapipe.pipeline.token_shares import shares_of
from ds_terapipe.pipeline.trained import check_trains
from ds_terapipe.pipeline.training import train
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.stream import Loader, StreamMark
from ds_terapipe.pipeline.transport.watchdog import Watchdog
from ds_terapipe.refusals import cuts
from ds_terapipe.schedule import Placement

logger = logging.getLogger(__name__)


class TokenPipelineEngine(PipelineEngine):
    """A :class:`PipelineEngine` whose pipeline carries slices of sequences. Same calls, same results.

    Args:
        token_pipeline: the block ``token_pipeline``.
        controller: changes the model or its placement between steps; default: nothing does.
        *args, **kwargs: as for ``PipelineEngine``, which ``deepspeed.initialize`` passes.

    Attributes:
        observers: :class:`Observer` objects that are called in every step and evaluation from the next one on.
    """

    loads_parts = True  # FusedLamb's hook is not needed
    continues_data = False  # whether training_data continues after a checkpoint's samples

    def __init__(
        self, *args: Any, token_pipeline: TokenPipelineConfig, controller: Controller | None = None, **kwargs: Any
    ) -> None:
        self._controller: Controller = controller or Controller()
        with broadcasting_scalars(self):
            super().__init__(*args, **kwargs)
        self._token_pipeline = token_pipeline
        for hook in (clip_by_true_norm, follow_replicas, keep_loss_state, follow_places):
            hook(self)
        pipelines = self.grid.pipe_groups
        view = RankView.of(Placement.plain(self.num_stages), self.global_rank, pipelines)
        new_mark = StreamMark if self.device.type == "cuda" else None
        self._watchdog = Watchdog(view, token_pipeline.timeout_s, new_mark, self.device)
        weakref.finalize(self, self._watchdog.close)
        self._consensus = Consensus(self._watchdog, pipelines, hash_of(token_pipeline))
        self._clock = Clock(self.device)
        self._shared = shared_weights(self.module, self._consensus)
        chunks = ModelChunks(self.module)
        refuse_split(self._shared, chunks.parts, chunks.places, "model")
        self._trace = new_trace(token_pipeline, self.num_stages, self._consensus)
        weakref.finalize(self, self._trace.close)
        self._memory = new_memory(self.device)
        self._steps = StepRunner(self.module, self._consensus, self._watchdog, Loader(self.device), self.device)
        self._checkpointer = self._controller.new_checkpointer(self._consensus)
        self.observers: list[Observer] = []
        self._sequences = [self.train_micro_batch_size_per_gpu()]  # of a micro-batch, since the start
        self._recorder = Recorder(self.stage_id, self._consensus, self._clock)
        self._build_runtime()

    def _build_runtime(self) -> None:
        """Make everything that depends on the placement of the layers and on which of them train; collective."""
        self.is_pipe_partitioned = self.is_grad_partitioned = False  # boundaries are small already: slices
        self._recorder.stage = self.stage_id
        self._report = StepReport(self.num_stages, "places" if ModelChunks(self.module).is_placed else "stages")
        self._gradients, here = DeepSpeedGradients(self), weakref.ref(self)
        with self._controller.building(self):
            placement = placement_of(self.module, self._consensus)
            self._runtime = PipelineRuntime.build(
                placement,
                self.grid.pipe_groups,
                ModelChunks(self.module).functions,
                device=self.device,
                watchdog=self._watchdog,
                gradients=self._gradients,
                module=self.module,
                memory=self._memory,
                autocast=lambda: autocast_if_enabled(here()),
                streams=self._controller.streams,
                first_stage=self._controller.first_stage(self, placement),
                host_group=self._consensus.group,
                shares=shares_of(self.module, self._consensus.gather),
            )
            if cuts(self.token_pipeline.slices) or getattr(self.module, "documents_of", None) is not None:
                self._runtime.intercept()
            self._replicas = ReplicaGradients(self, self._runtime.stages)
            self._watchdog.begin(self.global_steps, (), self._runtime.view)
            self._switches = [(name, p, p.requires_grad) for name, p in self.module.named_parameters()]
            self._layer_times = LayerTimes([stage.layers for stage in self._runtime.stages.values()], self.device)
            self._begin_slicing()

    def _begin_slicing(self) -> None:
        """Reset the slice plans of steps; collective."""
        self._slicer = new_slicer(self, self._consensus, self._memory, self._layer_times)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Make the optimizer; a stage that trains nothing passes an unused parameter."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            model_parameters = [unused(self.module, self.device, self.param_names)]
        super()._configure_optimizer(client_optimizer, model_parameters)
        if isinstance(self.optimizer, BF16_Optimizer):
            link_sums(self.optimizer)
            counting_nothing(self.optimizer)
        self._controller.check_optimizer(self)

    def _configure_fp16_optimizer(self, optimizer: Any, *args: Any) -> Any:
        with taking_no_step(optimizer):
            return super()._configure_fp16_optimizer(optimizer, *args)

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        """Choose the optimizer's wrapper; wrappers get the same groups on all ranks, none of them empty."""
        kind = super()._do_optimizer_sanity_check(basic_optimizer)
        self._controller.arrange_groups(self, basic_optimizer, kind)
        if kind is not None:
            occupy(basic_optimizer, self.module, self.device, self.param_names)
        return kind

    # ------------------------------------------------------------------------------------------------------- public facts

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
        refuse_ended(self)
        set_slices(self, slices, schedule)

    placement = property(attrgetter("_runtime.placement"), doc="Placement of the model's stages.")
    slices_run = property(
        lambda self: self._runtime.live.slices(),
        doc="Tokens of the slices that this stage ran in the last step or evaluation, by micro-batch and in order.",
    )
    units_run = property(
        attrgetter("_runtime.live.forward_units", "_runtime.live.backward_units"),
        doc="Numbers of units that this stage ran in the last step: forward, and backward (0 in an evaluation).",
    )
    peak_live_units = property(
        attrgetter("_runtime.live.peak_units"),
        doc="Largest number of live units on this stage in the last step: run forward and not yet backward.",
    )
    peak_live_tokens = property(
        attrgetter("_runtime.live.peak_tokens"), doc=":attr:`peak_live_units`, in tokens of a sequence."
    )

    @property
    def not_deferred(self) -> list[str]:
        """Names of this rank's trained matrices whose gradients are made slice by slice against the setting."""
        interception = self._runtime.interception
        if interception is None or not self.makes_weight_gradients_once():
            return []
        return interception.not_deferred(self.module.named_parameters())

    @property
    def hooked(self) -> list[str]:
        """Names of this rank's parameters with hooks of the user's that run slice by slice."""
        interception, once = self._runtime.interception, self.makes_weight_gradients_once()
        deferred = interception.deferred if interception is not None and once else ()
        return [name for name, p in self.module.named_parameters() if id(p) not in deferred and has_hooks(p)]

    def makes_weight_gradients_once(self) -> bool:
        """Whether weight gradients are made per micro-batch; "auto": not with activation checkpointing, to save memory.

        Under ``torch_autocast`` a layer multiplies with a copy of its weight, whose gradient autograd has to make.
        """
        choice = self.token_pipeline.weight_gradients
        if choice == "auto":
            return self.module.activation_checkpoint_interval == 0 and not self.torch_autocast_enabled()
        return choice == "micro_batch"

    # -------------------------------------------------------------------------------------------------------------- steps

    _exec_reduce_tied_grads = reduce_tied

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one optimiser step on the next ``gradient_accumulation_steps`` micro-batches.

        Returns the mean loss. Raises ConfigError on every rank for data or a model that cannot be cut,
        ``PipelineStalled`` if another stage does not answer. After an error in the middle of a step the engine is
        unusable, and further calls raise RuntimeError. An error before the step began leaves the engine as it was:
        iterators go on behind the step's micro-batches, and the loader of ``elastic_pipeline`` reads them again.
        """
        refuse_ended(self)
        check_trains(self)
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        return train(self)

    def eval_batch(self, data_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch without gradients; arguments and result see ``PipelineEngine.eval_batch``."""
        refuse_ended(self)
        return evaluate(self, data_iter, *args, **kwargs)

    # -------------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, save_latest: bool = True, *args: Any, **kw: Any
    ) -> Any:
        """Override ``PipelineEngine.save_checkpoint``: save atomically, with the plan of ``"slices": "auto"``."""
        refuse_ended(self)
        save = super().save_checkpoint
        return self._checkpointer.save(self, save, save_dir, tag, client_state or {}, save_latest, *args, **kw)

    def load_checkpoint(self, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Override ``PipelineEngine.load_checkpoint``: check the files first, and use a plan in the checkpoint again.

        Raises:
            ConfigError: on every rank, a file that is missing, not as it was saved, or not of this model: nothing was changed.
        """
        refuse_ended(self)
        with resuming(self):
            return self._checkpointer.load(self, super().load_checkpoint, LoadArguments(load_dir, tag, *args, **kwargs))

    def recover_checkpoint(self, folder: Any, tag: Any = None) -> Path | None:
        """Restore a checkpoint that a killed job was replacing; collective.

        `load_checkpoint` begins with it; call it before other reads from the folder. Returns the folder of the
        checkpoint, by default of the latest; None where there is none.
        """
        return self._checkpointer.recover(self, folder, tag)

    # ---------------------------------------------------------------------------------------------------------------- end

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

    def destroy(self) -> None:
        """Release the process groups, threads and hooks of this engine and its module; collective.

        The module keeps its weights and cannot train any more, see ``teardown.py``. After a failed step the groups stay:
        messages may still be in flight, and their receivers may be gone.
        """
        self._controller.ended = True
        if not self._watchdog.ended:
            close_engine(self)
        self._release()
        super().destroy()
        self._watchdog.ended = self._watchdog.ended or DESTROYED

    def __del__(self) -> None:
        # A destroyed ZeRO would wait for the device once more, where another engine's receives may wait for what this rank
        # has yet to send: garbage is collected at any time.
        ended = getattr(getattr(self, "_watchdog", None), "ended", None)
        for undo in (self._release,) if ended else (self._release, super().destroy):
            with suppress(Exception):  # for an engine whose constructor failed
                undo()

    def _release(self) -> None:
        """Release this process's resources without collectives: each rank collects garbage at its own time."""
        self._controller.release()
        self._trace.close()
        self._watchdog.close()
        self._runtime.leave()
        detach_engine(self)
