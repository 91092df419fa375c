"""Pipeline engine that freezes layers during training, and moves the others to fewer stages and more replicas.

At the beginning of a step the policies decide which entries of the layer list are frozen and how many stages the others
use. On a change, frozen parameters leave the optimiser, and layers move with all their state (``transfer.py``). Then
DeepSpeed's engine is rebuilt around the same objects: engine, module, optimizer, scheduler and the user's loader stay
alive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.elastic.checkpoints import ElasticCheckpoints, resized
from ds_terapipe.elastic.moves.groups import level_steps
from ds_terapipe.elastic.moves.layers import drop_copies, leave_loss
from ds_terapipe.elastic.moves.masters import is_wrapped, join, unwrap
from ds_terapipe.elastic.moves.rebuild import rebuild_engine
from ds_terapipe.elastic.moves.reshape import Reshape, check_movable
from ds_terapipe.elastic.moves.shares import Bucket, new_bucket
from ds_terapipe.elastic.policies.freeze import ModelLayers
from ds_terapipe.elastic.policies.resize import POLICY, Shape, balanced, check, shape_of, wanted_stages
from ds_terapipe.elastic.report import Transition, TransitionReport
from ds_terapipe.elastic.settings import ElasticPipelineConfig, check_alike
from ds_terapipe.elastic.shapes.costs import Costs, state_bytes, trained_sizes
from ds_terapipe.elastic.shapes.history import KEY as HISTORY_KEY
from ds_terapipe.elastic.shapes.history import History, StepShape, check_history
from ds_terapipe.elastic.shapes.measured import ShapeSelector
from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from ds_terapipe.pipeline.shared_weights import refuse_split, shared_weights, split
from ds_terapipe.pipeline.teardown import shape_groups
from ds_terapipe.pipeline.transport.consensus import error_of
from ds_terapipe.plan.files import check_writable, check_writable_folder
from ds_terapipe.process_groups import close_groups, gathered

logger = logging.getLogger(__name__)


class ElasticPipelineEngine(ElasticCheckpoints):
    """A :class:`TokenPipelineEngine` that freezes layers and reshapes its pipeline at step boundaries.

    Args:
        elastic_pipeline: the block of the same name.
        token_pipeline: the block ``token_pipeline``, or one slice if there is none.
        *args, **kwargs: as for ``PipelineEngine``, which ``deepspeed.initialize`` passes.
    """

    elastic_pipeline: ElasticPipelineConfig
    _selector: ShapeSelector | None = None  # times layers and chooses shapes, if layers may move
    _history: History | None = None  # on the first rank, if configured
    _changed = False  # whether layers froze or moved since the start

    def __init__(self, *args: Any, elastic_pipeline: ElasticPipelineConfig, **kwargs: Any) -> None:
        self.elastic_pipeline = elastic_pipeline
        self._arguments = {
            key: value for key, value in kwargs.items() if key not in ("token_pipeline", "model_parameters")
        }
        self._reshaped: list[Callable[[ElasticPipelineEngine], None]] = []
        self._transitions, self.costs = TransitionReport(), Costs()
        # NCCL gathers objects on the current device: the node's first on all ranks until DeepSpeed sets it
        get_accelerator().set_device(kwargs["model"].local_rank)
        # before all that depends on it
        check_alike(gathered(elastic_pipeline.model_dump(), kwargs["model"].world_group))
        leave_loss(kwargs["model"])
        super().__init__(*args, **kwargs)
        self._start_feeding()
        self._know_phases()
        self._sizes = trained_sizes(self.module, self._consensus)
        layers = ModelLayers(tuple(size > 0 for size in self._sizes))
        self.untrained_layers = self._sizes.index(
            next(size for size in self._sizes if size)
        )  # entries frozen by the user
        tensor, batch = self.grid.model_parallel_size, self.train_batch_size()
        check(
            elastic_pipeline, layers, self.num_stages, self.world_size, tensor, batch, self.micro_batch_size,
            self.training_data is not None, self.batches,
        )  # fmt: skip
        self._start_freezing(layers)
        path = elastic_pipeline.history_path
        if path is not None:
            self._consensus.decide(lambda: check_writable(HISTORY_KEY, path, "e.g. history.jsonl"))
            self._consensus.decide(lambda: check_history(path))
            self._history = History(path) if self.global_rank == 0 else None
        cache = elastic_pipeline.cache
        if cache.enabled and cache.disk_path is not None:  # each machine checks its own disk
            key, folder = f"{cache.PATH}.disk_path", cache.disk_path
            self._consensus.agree(error_of(lambda: check_writable_folder(key, folder, 'e.g. "cache/"')))
        if self.elastic_pipeline.moves:
            self._begin_to_move()

    def _begin_to_move(self) -> None:
        """Check whether layers can move to other ranks; collective."""
        dtype = self._layer_dtype
        error = error_of(lambda: check_movable(self.module, self.basic_optimizer, self.device, dtype))
        if self.elastic_pipeline.has_to_move:
            self._consensus.agree(error)
        reasons = [reason for reason in self._consensus.gather(None if error is None else str(error)) if reason]
        if reasons:
            self.elastic_pipeline = self.elastic_pipeline.staying(reasons[0])
            return
        self._selector = ShapeSelector(self, self._consensus)
        drop_copies(self.module)

    # --------------------------------------------------------------------------------------------------- what is shown

    def on_reshape(self, callback: Callable[[ElasticPipelineEngine], None]) -> None:
        """Call ``callback`` with the engine after each reshape."""
        self._reshaped.append(callback)

    # ------------------------------------------------------------------------------------------------------------ steps

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train a batch, in the shape and with the frozen layers that the policies choose for this step."""
        self._refuse_broken()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self._seed is None:
            # the first rank's seed, read now: users may seed stages differently, also after building the engine
            self._seed = self._consensus.decide(self._first_seed)
            self._reseed()
        step = self.global_steps
        self._note_epochs(step)
        frozen, start = self._decide_frozen(step), self.start_shape.stages
        present = start if frozen < self._frozen else self.num_stages  # unfrozen layers may need more stages
        stages = wanted_stages(self.elastic_pipeline.resize, step, present, start, self._sizes, frozen)
        parts, taken = None, None if self._selector is None else self._selector.decide(frozen)
        if taken is not None:
            stages, parts = taken.shape.stages, taken.parts
        if (frozen, stages) != (self._frozen, self.num_stages) or parts not in (None, tuple(self.module.parts)):
            self._change(frozen, stages, parts, step=step)
        with self._told(step), nullcontext() if self._selector is None else self._selector.watching():
            loss = super().train_batch()
        self._keep_loss(loss)
        return loss

    def _told(self, step: int) -> AbstractContextManager[None]:
        """Return a context manager for a step that records its shape in the history."""
        if self._history is None:
            return nullcontext()
        parts, frozen = tuple(map(int, self.module.parts)), max(self._frozen, self.untrained_layers)
        return self._history.step(step, StepShape(*self.shape, frozen, parts), self.module._topo)

    def _release(self) -> None:
        if self._history is not None:
            self._history.close()
        super()._release()

    def _reseed(self) -> None:
        assert self._streams is not None
        self._streams.seed = self._seed or 0

    def _build_runtime(self) -> None:
        if self._streams is None:
            shard = self.grid.get_slice_parallel_rank() if self.grid.model_parallel_size > 1 else 0
            self._streams = RandomStreams(0, self.device, shard)
        # ranks reach the launch at different times, and a change together
        with nullcontext() if self._redistributor is None else self._watchdog.making_groups():
            super()._build_runtime()
        if self._selector is not None:
            self._selector.begin()

    def _slice_settings(self) -> TokenPipelineConfig:
        """Drop the plan and the measurements file after a change: they are for the starting placement."""
        settings = super()._slice_settings()
        return settings.model_copy(update={"plan_path": None, "measurements_path": None}) if self._changed else settings

    def follow_phase(self, batch: int, micro_batch: int) -> None:
        """Extend ``ElasticPhases.follow_phase``: measure again for the new batch."""
        super().follow_phase(batch, micro_batch)
        if self._selector is not None and len(self.batches) > 1:
            self._selector.restart()

    def _first_seed(self) -> int:
        return int(self.module.base_seed if self.module.seed_layers else torch.initial_seed())

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        with nullcontext() if self._selector is None else self._selector.updating():
            super()._exec_optimizer_step(lr_kwargs)

    # ------------------------------------------------------------------------------------------------------ transitions

    def _change(self, frozen: int, stages: int, parts: Sequence[int] | None = None, *, step: int | None) -> None:
        """Freeze and reshape; collective.

        Args:
            frozen, stages: from now on.
            parts: first entry of each stage, then the number of entries; default: balanced by costs.
            step: before which this is; None: before a checkpoint is read.
        """
        started, shape, before = time.perf_counter(), self.shape, state_bytes(self, self._consensus)
        level_steps(self.basic_optimizer)
        new = shape_of(
            stages,
            self.world_size,
            self.grid.model_parallel_size,
            self.train_batch_size(),
            self.start_shape.micro_batch,
        )
        if parts is None and (new != shape or (self.elastic_pipeline.moves and stages > 1)):
            parts = self._balanced(new, frozen)
        reshape = None
        if parts is not None and (new != shape or list(parts) != list(self.module.parts)):
            self._check_shared(parts, frozen)
            reshape = Reshape(
                self.module, self.basic_optimizer, self._consensus, self._watchdog, self.device, self._layer_dtype
            )
            reshape.prepare(resized(self.module._topo, new.stages), parts)
        self._recorder.begin(self.global_steps + 1, wanted=step is not None and self._trace.wants(step + 1))
        with self._bucket() as bucket, self._poison_on_error(), self._recorder.collective("reshape"):
            self._runtime.close()
            if bucket is not None:
                unwrap(self.optimizer, self.module)
            freed = self._freeze(frozen)
            if reshape is not None and self._norms is not None:
                self._norms.load(self._norms.state(self._consensus))  # the new owner of a layer needs its norms
            sent = 0 if reshape is None else self._reshape(new, reshape, bucket)
            if bucket is not None and reshape is None:
                self.optimizer = self._wrapped(self.basic_optimizer, self.optimizer, bucket)
            self._changed = True
            self._build_runtime()
        self._trace.keep(self._recorder.end())
        self._tell(step, shape, before, time.perf_counter() - started, freed, sent)

    def _bucket(self) -> AbstractContextManager[Bucket | None]:
        """Return the context manager of a bucket for masters and moments; None without DeepSpeed's wrappers."""
        if not is_wrapped(self.optimizer):
            return nullcontext()
        return new_bucket(self.device, self._consensus, self.module._topo.get_axis_comm_lists("data"))

    def _balanced(self, shape: Shape, frozen: int) -> Sequence[int]:
        """Balance the entries of a shape's stages by their costs; collective."""
        forward, backward, _ = self.costs.now(self, self._consensus, self._layer_times)
        present = list(map(int, self.module.parts)) if shape == self.shape else None
        first = max(frozen, self.untrained_layers)
        parts = balanced(self._without_kept(forward, first), backward, first, shape.stages, present)
        return parts if present is None or not split(self._shared, parts) else present

    def _check_shared(self, parts: Sequence[int], frozen: int) -> None:
        """Refuse stages that would each train a copy of a weight that their layers share now; collective.

        Raises:
            ConfigError: on every rank; nothing has been changed.
        """
        self._shared = shared_weights(self.module, self._consensus, also=self._aside)
        stays_frozen = 0 if self.elastic_pipeline.freeze.unfreeze else frozen
        trained = [each for each in self._shared if each.entries[0] >= stays_frozen]
        refuse_split(trained, parts, POLICY, ', or "off"')

    def _reshape(self, shape: Shape, reshape: Reshape, bucket: Bucket | None) -> int:
        """Run a prepared reshape; return the bytes that this rank sent."""
        old = shape_groups(self.module)
        if bucket is not None:
            join(self.basic_optimizer, bucket)
        reshape.run(bucket)
        close_groups(old)
        with self._watchdog.making_groups():
            rebuild_engine(self, shape, self._arguments)
        self._consensus.set_pipelines(self.grid.pipe_groups)
        self._follow_data()
        for callback in self._reshaped:
            callback(self)
        return reshape.sent_bytes

    def _times_layers(self) -> bool:
        return super()._times_layers() or (self._selector is not None and self._selector.times_layers)

    def _tell(self, step: int | None, before: Shape, fullest: float, seconds: float, freed: int, sent: int) -> None:
        """Report a transition; collective."""
        freed_bytes, sent_bytes = (sum(self._consensus.collect(float(each))) for each in (freed, sent))
        transition = Transition(
            step, self._frozen, len(self._sizes), before, self.shape, seconds, freed_bytes, sent_bytes, fullest,
            state_bytes(self, self._consensus),
        )  # fmt: skip
        self._trace.describe(stages=self.num_stages, frozen_layers=self._frozen)
        if self._selector is not None:
            self._selector.change_seconds = seconds
        if self._history is not None:
            self._history.changed(seconds)
        if self.global_rank == 0:
            self._transitions.tell(transition, self.monitor, self.global_samples)
