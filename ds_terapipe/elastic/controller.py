"""Controller of an elastic engine: decides before each step which layers are frozen, and where the others are.

On a change, frozen parameters leave the optimiser, and layers move with all their state (``moves/``). Then DeepSpeed's
engine is rebuilt around the same objects: engine, module, optimizer, scheduler and the user's loader stay alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from ds_terapipe.elastic.cache.session import CacheSession
from ds_terapipe.elastic.cache.stage import CachedStage
from ds_terapipe.elastic.changing import Change, Mover, check_changeable
from ds_terapipe.elastic.checkpoints import ElasticCheckpointer
from ds_terapipe.elastic.data import ElasticData
from ds_terapipe.elastic.freezing import LayerFreezing
from ds_terapipe.elastic.moves.layers import drop_copies
from ds_terapipe.elastic.moves.reshape import check_movable
from ds_terapipe.elastic.moves.start import trained_sizes
from ds_terapipe.elastic.optimizer import check_kept, check_steps, same_groups
from ds_terapipe.elastic.policies.freeze import ModelLayers
from ds_terapipe.elastic.policies.resize import Shape, check, wanted_stages
from ds_terapipe.elastic.report import ChangeReport
from ds_terapipe.elastic.settings import EPOCH, ElasticPipelineConfig
from ds_terapipe.elastic.shapes.costs import state_bytes
from ds_terapipe.elastic.shapes.history import KEY as HISTORY_KEY, History, StepShape, check_history
from ds_terapipe.elastic.shapes.measured import ShapeSelector
from ds_terapipe.job import error_of
from ds_terapipe.json_files import check_writable, check_writable_folder
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.checkpoints import Checkpointer
from ds_terapipe.pipeline.controller import Controller
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.schedule import Placement


class ElasticController(Controller):
    """Decides on frozen layers and shapes, and owns the parts that follow them.

    Args:
        settings: the block ``elastic_pipeline``.
        arguments: arguments of DeepSpeed's constructor, for a rebuild.

    Attributes:
        settings: without moves if the model or the optimizer does not allow them.
        data, freezing, caching, mover: the parts.
        untrained: number of entries of the layer list that the user has frozen.
    """

    def __init__(self, settings: ElasticPipelineConfig, arguments: Mapping[str, Any]) -> None:
        self.settings, self._arguments = settings, arguments
        self.data, self.caching = ElasticData(settings.data), CacheSession(settings.cache)
        self._started = False  # whether DeepSpeed's constructor has ended
        self._selector: ShapeSelector | None = None  # times layers and chooses shapes, if layers may move
        self._history: History | None = None  # on the first rank, if configured
        self._change_report = ChangeReport()

    # ------------------------------------------------------------------------------------------------------ construction

    def arrange_groups(self, engine: Any, optimizer: Any, kind: str | None) -> None:
        """Arrange the parameter groups at the start; if layers may move, all ranks get the same groups."""
        if not self._started:
            self.settings = same_groups(engine, optimizer, self.settings)
            super().arrange_groups(engine, optimizer, kind)

    def check_optimizer(self, engine: Any) -> None:
        """Refuse an optimizer that layers cannot leave and enter."""
        check_steps(self.settings.freeze, engine.basic_optimizer)
        self.settings = check_kept(self.settings, engine)

    def new_checkpointer(self, consensus: Consensus) -> Checkpointer:
        """Return what saves and loads checkpoints of any shape."""
        return ElasticCheckpointer(self, consensus)

    @contextmanager
    def building(self, engine: Any) -> Iterator[None]:
        """Context manager around the construction of a runtime."""
        self.make_streams(engine)
        # ranks reach the launch at different times, and a change together
        with engine._watchdog.making_groups() if self._started else nullcontext():
            self._started = True
            yield
        if self._selector is not None:
            self._selector.begin()

    def first_stage(self, engine: Any, placement: Placement) -> Callable[..., Stage]:
        """Return the factory of the model's first stage: a cached one if it is frozen."""
        return partial(CachedStage, session=self.caching) if self.caching.serves(engine, placement) else Stage

    def start(self, engine: Any) -> None:
        """Make the parts that need a built engine; collective.

        Raises:
            ConfigError: on every rank, for settings that this model, optimizer or job cannot follow.
        """
        settings = self.settings
        self.data.start(engine)
        sizes = trained_sizes(engine.module, engine._consensus)
        # a tied layer counts with its first entry
        self._sizes = [sizes.pop(prefix, 0) for prefix in ModelChunks(engine.module).prefixes]
        layers = ModelLayers(tuple(size > 0 for size in self._sizes))
        self.untrained = self._sizes.index(next(size for size in self._sizes if size))
        tensor, batch = engine.grid.model_parallel_size, engine.train_batch_size()
        check(
            settings, layers, engine.num_stages, engine.world_size, tensor, batch, engine.micro_batch_size,
            engine.training_data is not None, self.data.batches,
        )  # fmt: skip
        completed = partial(_intervals_before, weakref.proxy(engine), self.data, settings.freeze.interval)
        self.freezing = LayerFreezing(settings.freeze, layers, engine.device, completed)
        self._history = _open_history(engine, settings)
        self.settings = settings = _movable(engine, settings)
        if settings.moves:
            self._selector = ShapeSelector(engine, engine._consensus)
            drop_copies(engine.module)
        self.mover = Mover(self._arguments, self.freezing, self.data, self.caching)

    # ------------------------------------------------------------------------------------------------------------- steps

    def before_step(self, engine: Any) -> None:
        """Decide on the step that begins, and change the engine; collective."""
        self.data.note_epochs(engine)
        self.follow(engine, self._decide(engine), step=engine.global_steps)

    def _decide(self, engine: Any) -> Change:
        """Return what holds from this step on; collective if a policy needs data of all ranks."""
        step, start = engine.global_steps, self.data.start_shape.stages
        frozen = self.freezing.decide(engine, step)
        present = start if frozen < self.freezing.frozen else engine.num_stages  # unfrozen layers may need more stages
        stages = wanted_stages(self.settings.resize, step, present, start, self._sizes, frozen)
        taken = None if self._selector is None else self._selector.decide(frozen)
        return Change(frozen, stages) if taken is None else Change(frozen, taken.shape.stages, taken.parts)

    def follow(self, engine: Any, change: Change, *, step: int | None) -> None:
        """Call :meth:`change` if something differs from the present state; collective."""
        parts, now = change.parts, ModelChunks(engine.module).parts
        same_parts = parts is None or tuple(parts) == now
        if change[:2] != (self.freezing.frozen, engine.num_stages) or not same_parts:
            self.change(engine, change, step=step)

    def change(self, engine: Any, change: Change, *, step: int | None) -> None:
        """Apply a change and report it; collective. ``step``: before which this is; None: before a checkpoint is read."""
        consensus, before, held = engine._consensus, engine.shape, state_bytes(engine, engine._consensus)
        consensus.together(lambda: check_changeable(engine))
        changed = self.mover.apply(engine, change, step is not None and engine._trace.wants(step + 1))
        freed, sent = (int(sum(consensus.gather(float(each)))) for each in (changed.freed, changed.sent))
        fullest = held, state_bytes(engine, consensus)
        engine._trace.describe(stages=engine.num_stages, frozen_layers=self.freezing.frozen)
        if self._selector is not None:
            self._selector.change_seconds = changed.seconds
        if self._history is not None:
            self._history.changed(changed.seconds)
        if engine.global_rank == 0:
            changed = changed._replace(freed=freed, sent=sent)
            self._change_report.tell(engine, step, before, changed, len(self._sizes), fullest)

    @contextmanager
    def around_step(self, engine: Any) -> Iterator[None]:
        """Context manager around a training step, for the history and the selector."""
        recorded: AbstractContextManager[None] = nullcontext()
        if self._history is not None:
            chunks, frozen = ModelChunks(engine.module), max(self.freezing.frozen, self.untrained)
            shape: Shape = engine.shape
            ran_on = StepShape(*shape, frozen, chunks.parts, chunks.places if chunks.is_placed else None)
            recorded = self._history.step(engine.global_steps, ran_on, engine.module._topo)
        with recorded, nullcontext() if self._selector is None else self._selector.watching():
            yield

    def follow_phase(self, engine: Any, batch: int, micro_batch: int) -> None:
        """Apply a phase of ``MixedBatch``; see ``ElasticPipelineEngine.follow_phase``."""
        self.follow_micro_batch(engine, batch, micro_batch, restarts=len(self.data.batches) > 1)
        self.caching.follow_phase(engine)

    def follow_micro_batch(self, engine: Any, batch: int, micro_batch: int, restarts: bool = True) -> None:
        """Set the batch, and the readers' micro-batch; ``restarts``: whether layers are timed again."""
        self.data.follow_phase(engine, batch, micro_batch)
        if self._selector is not None and restarts:
            self._selector.restart()

    # -------------------------------------------------------------------------------------------- around parts of a step

    @contextmanager
    def preparing(self, engine: Any) -> Iterator[None]:
        """Context manager around reading and inspecting a step; after an error the engine's loader reads it again."""
        try:
            with self.caching.reading():
                yield
        except BaseException:
            self.data.go_back(engine)
            raise

    def read(self, engine: Any, pull: Callable[[], Any], micro_batches: int) -> list[Any]:
        """Read micro-batches, in any shape, and note their inputs for the cache."""
        items = self.data.read(engine, pull, micro_batches, super().read)
        self.caching.record_inputs(items)
        return items

    def enter_training(self, engine: Any) -> None:
        """Put layers into training mode, frozen ones into evaluation mode; with a cache also those that the user has frozen."""
        super().enter_training(engine)
        # on every stage alike: which of them the first one has, and keeps for all epochs, depends on the shape
        kept = self.untrained if self.settings.cache.enabled else 0
        self.freezing.enter_evaluation(engine.module, max(self.freezing.frozen, kept))

    @property
    def times_layers(self) -> bool:
        """Whether the layers of the running step are timed, for a choice of the next shape."""
        return self._selector is not None and self._selector.times_layers

    @contextmanager
    def optimizer_step(self, engine: Any) -> Iterator[None]:
        """Context manager around the optimizer's step: gradient norms before it, and its time."""
        with nullcontext() if self._selector is None else self._selector.updating():
            self.freezing.norms.add(engine)
            yield

    # --------------------------------------------------------------------------------------------------------------- end

    def release(self) -> None:
        """Release this process's resources without collectives; idempotent."""
        if self._history is not None:
            self._history.close()
        self.data.close()
        self.caching.close(self.ended)


def _open_history(engine: Any, settings: ElasticPipelineConfig) -> History | None:
    """Open the configured history on the first rank, and check the cache's folder on all; collective."""
    path, cache, consensus = settings.history_path, settings.cache, engine._consensus
    if path is not None:
        consensus.decide(lambda: check_writable(HISTORY_KEY, path, "e.g. history.jsonl"))
        consensus.decide(lambda: check_history(path))
    if cache.enabled and cache.disk_path is not None:  # each machine checks its own disk
        key, folder = f"{cache.PATH}.disk_path", cache.disk_path
        consensus.together(lambda: check_writable_folder(key, folder, 'e.g. "cache/"'))
    return History(path) if path is not None and engine.global_rank == 0 else None


def _movable(engine: Any, settings: ElasticPipelineConfig) -> ElasticPipelineConfig:
    """Return the settings, without moves if layers cannot move to other ranks and need not; collective."""
    if not settings.moves:
        return settings
    consensus, error = engine._consensus, error_of(lambda: check_movable(engine))
    if settings.has_to_move:
        consensus.agree(error)
    reasons = [reason for reason in consensus.gather(None if error is None else str(error)) if reason]
    return settings.staying(reasons[0]) if reasons else settings


def _intervals_before(engine: Any, data: ElasticData, interval: Any, step: int) -> int:
    """Return the number of intervals completed before a step."""
    return data.epochs_before(engine, step) if interval == EPOCH else step // interval
