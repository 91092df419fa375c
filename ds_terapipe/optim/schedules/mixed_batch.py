"""``MixedBatch``: phases of batch size and sequence length, each with an LR that is ramped from zero again.

The schedule counts optimiser steps. Attached to an engine it also switches what a phase changes, after the step that
ends the phase before: DeepSpeed still needs the old batch size to count samples and to average the loss of that step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ds_terapipe.errors import ConfigError
from ds_terapipe.job import Job
from ds_terapipe.optim.schedules.keys import PHASES, MixedBatchKeys, Phase
from ds_terapipe.optim.schedules.lr_rules import Schedule
from ds_terapipe.optim.schedules.phases import check_division, micro_batch_sizes, position
from ds_terapipe.optim.schedules.training_loader import TrainingLoader, is_deepspeed_loader, reads_ahead
from ds_terapipe.overrides import override

logger = logging.getLogger(__name__)


class MixedBatch(Schedule):
    """The LR of ``scheduler.params.phases``, and the batch, micro-batch and sequence length of the phase in force.

    Between the last step of a phase and the next batch, on every rank, the engine gets the next phase's
    ``train_batch_size`` and micro-batch size, data sets that were given to ``deepspeed.initialize(training_data=...)`` or
    :meth:`register_dataset` get ``set_seq_length(n)``, and a pipeline forgets the shapes of its activations. A step that
    DeepSpeed skipped for an overflow does not count. After the last phase its batch stays, and its ``end_lr``.

    Data: DeepSpeed's own loader of ``training_data`` continues after the last sample delivered, in micro-batches of the
    new size. Nothing is lost or repeated, unless ``len(dataset)`` changes with the length: then an epoch starts. As
    without phases, an epoch's last micro-batch may be smaller, or is left out with ``dataloader_drop_last``. Other
    iterators are the user's: they have to give micro-batches of ``engine.train_micro_batch_size_per_gpu()`` samples,
    beside elastic_pipeline of ``engine.start_shape.micro_batch``, and ones with worker processes must be recreated when
    :attr:`phase_index` has changed, which is checked.

    Resuming: ``engine.load_checkpoint`` puts the phase and the position in it in force again. A pipeline engine's
    ``training_data`` continues where it was; in your own loop over a loader, :meth:`seek` does that.

    Args:
        optimizer: its ``param_groups`` get the LR.
        params: ``phases``, a list of :class:`~ds_terapipe.optim.schedules.keys.Phase` keys.

    Raises:
        ConfigError: a wrong value.
    """

    def __init__(self, optimizer: Any, **params: Any) -> None:
        super().__init__(optimizer)
        self.phases = MixedBatchKeys(**params).phases
        self._engine: Any = None
        self._loaders: list[TrainingLoader] = []
        self._datasets: list[Any] = []
        self._in_force: int | None = None
        self._checked_data = False
        self._iterator_before: Any = None
        self.take_effect()

    # --------------------------------------------------------------------------------------------------- where it stands

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def phase_index(self) -> int:
        """Number of the phase that the next step lies in, from 0."""
        return position(self.phases, self.steps_taken)[0]

    @property
    def phase(self) -> Phase:
        """The phase that the next step lies in: ``phase.batch_size``, ``phase.seq_length``, ..."""
        return self.phases[self.phase_index]

    def lr_at(self, step: int) -> float:
        """The LR of the step after ``step`` others: the phase's ramp, from its first step on."""
        index, taken = position(self.phases, step)
        return self.phases[index].ramp.lr(taken)

    def state_dict(self) -> dict[str, Any]:
        """The position, the phases it counts in, and how far all replicas are in an epoch of ``training_data``."""
        replicas = 1 if self._engine is None else _replicas(self._engine)
        delivered = [loader.delivered * replicas for loader in self._loaders]
        return {**super().state_dict(), "phases": self._described(), "delivered": delivered}

    def _described(self) -> list[dict[str, Any]]:
        names = ("batch_size", "seq_length", "micro_batch_size")
        return [{name: getattr(phase, name) for name in names} | {"ramp": asdict(phase.ramp)} for phase in self.phases]

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go to the position in ``state`` and put its phase in force; collective when attached to an engine.

        Raises:
            ValueError: ``state`` is another scheduler's.
        """
        super().load_state_dict(state)
        assert state is not None  # or the line before had raised
        if self._described() != state["phases"]:
            logger.warning("MixedBatch: the checkpoint was made with other phases, step %d is now in phase %d of %d",
                           self.steps_taken, self.phase_index, len(self.phases))  # fmt: skip
        if self._engine is None:
            return
        self._enter(self.phase_index)
        if _is_pipeline(self._engine):  # elsewhere the loop over the loader is the user's
            for loader, delivered in zip(self._loaders, state["delivered"], strict=False):
                loader.seek(delivered // _replicas(self._engine))

    # -------------------------------------------------------------------------------------------------------- the engine

    def attach(self, engine: Any) -> None:
        """Switch ``engine`` from phase to phase; the first one's settings are in force on return. Collective.

        Args:
            engine: ``DeepSpeedEngine`` or ``PipelineEngine`` whose ``lr_scheduler`` this is.

        Raises:
            ConfigError: on every rank, for a batch that is not made of whole micro-batches of all replicas, or
                ``training_data`` without ``set_seq_length`` where the length changes.
        """
        if self._engine is engine:
            return
        if engine.lr_scheduler is not self or self._engine is not None:
            raise RuntimeError("MixedBatch: attach() is for the one engine whose lr_scheduler it is")
        micro = self.phases[0].micro_batch_size or engine.train_micro_batch_size_per_gpu()
        check_division(self.phases, micro, engine.dp_world_size)
        self._micro_batch_sizes = micro_batch_sizes(self.phases, micro)
        self._engine = engine
        if engine.training_dataloader is not None and hasattr(engine, "follow_phase"):
            self._datasets.append(engine.training_dataloader.dataset)  # its loader follows the engine
        elif engine.training_dataloader is not None and _reads_data(engine):
            self._loaders.append(TrainingLoader(engine.training_dataloader))
        Job.current().together(self._require_all)
        self._enter(self.phase_index)
        super().attach(engine)
        override(engine, "train_batch" if _is_pipeline(engine) else "step", self._switching)

    def register_dataset(self, dataset: Any) -> None:
        """Have ``dataset.set_seq_length(n)`` called now and at every change of phase.

        For data that does not come from ``deepspeed.initialize(training_data=...)``; every rank that reads data calls it,
        before the first batch.

        Args:
            dataset: an object with ``set_seq_length``, or a loader made by ``engine.deepspeed_io``, whose batches then
                follow the phases as well.

        Raises:
            ConfigError: it has no ``set_seq_length`` though the sequence length changes.
        """
        loader = TrainingLoader(dataset) if is_deepspeed_loader(dataset) else None
        if loader is not None:
            dataset = loader.dataset
        self._require(dataset)
        self._set_length(dataset)
        if loader is None:
            self._datasets.append(dataset)
            return
        self._loaders.append(loader)
        if self._engine is not None:
            loader.recut(self._micro_batch_sizes[self.phase_index])

    def seek(self, samples: int) -> None:
        """Go on behind ``samples`` samples of ``training_data``, over all replicas and epochs: ``engine.global_samples``.

        For your own loops over a loader, after ``engine.load_checkpoint`` and before the loop.
        """
        for loader in self._loaders:
            loader.seek(samples // _replicas(self._engine))

    def _switching(self, engine: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the engine's ``train_batch`` or ``step``, and after it the end of a phase."""
        if not self._checked_data:
            Job.current().together(self._check_data)
            self._checked_data = True
        if self._iterator_before is not None:
            given = args[0] if args else kwargs.get("data_iter")
            Job.current().together(lambda: self._check_iterator(given))
            self._iterator_before = None
        result = method(*args, **kwargs)
        if self.phase_index != self._in_force:
            self._enter(self.phase_index)
        return result

    def _enter(self, index: int) -> None:
        """Put a phase in force, whatever was before: everything here may be done twice."""
        phase, micro, engine = self.phases[index], self._micro_batch_sizes[index], self._engine
        before = None if self._in_force is None else self.phases[self._in_force]
        if _is_pipeline(engine) and before is not None and before.seq_length != phase.seq_length:
            self._iterator_before = (engine.data_iterator,)
        follow = getattr(engine, "follow_phase", None)  # of an engine whose shape may not be that of the start
        if follow is None:
            set_batch(engine, phase.batch_size, micro)

        def switch_data() -> None:
            for dataset in self._data():
                self._set_length(dataset)
            for loader in self._loaders:
                loader.recut(micro)

        Job.current().together(switch_data)
        if follow is not None:
            follow(phase.batch_size, micro)
        if hasattr(engine, "reset_activation_shape"):
            engine.reset_activation_shape()
        self._in_force = index
        if before is not None and before != phase and Job.current().is_first:
            logger.info(
                "MixedBatch: phase %d of %d from step %d on: batch %d in micro-batches of %d, %d tokens, lr up to %g",
                index + 1, len(self.phases), self.steps_taken, phase.batch_size, micro, phase.seq_length, phase.ramp.peak,
            )  # fmt: skip

    def _length_changes(self) -> bool:
        return len({phase.seq_length for phase in self.phases}) > 1

    def _set_length(self, dataset: Any) -> None:
        if hasattr(dataset, "set_seq_length"):
            dataset.set_seq_length(self.phase.seq_length)

    def _require(self, dataset: Any) -> None:
        if self._length_changes() and not hasattr(dataset, "set_seq_length"):
            lengths = [phase.seq_length for phase in self.phases]
            raise ConfigError(
                f"{PHASES}: got seq_length {lengths} with data of type {type(dataset).__name__}, must have a method "
                "set_seq_length(n) where the length changes, use a data set that has one or phases of one length"
            )

    def _data(self) -> list[Any]:
        return [*self._datasets, *(loader.dataset for loader in self._loaders)]

    def _require_all(self) -> None:
        for dataset in self._data():
            self._require(dataset)

    def _check_data(self) -> None:
        if not self._length_changes() or not _reads_data(self._engine):
            return
        self._require_all()
        if not self._data():
            lengths = [phase.seq_length for phase in self.phases]
            raise ConfigError(
                f"{PHASES}: got seq_length {lengths} and no data set to set it on, must have one before the first "
                "batch, use engine.lr_scheduler.register_dataset(dataset), or initialize(training_data=dataset)"
            )

    def _check_iterator(self, given: Any) -> None:
        iterator = self._engine.data_iterator if given is None else given
        if iterator is self._iterator_before[0] and reads_ahead(iterator):
            raise ConfigError(
                "the data iterator: got the one of the phase before, whose worker processes hold batches of the old length, "
                "must be made again, use e.g. iter(loader) when engine.lr_scheduler.phase_index has changed"
            )


def set_batch(engine: Any, batch_size: int, micro_batch_size: int) -> None:
    """Batch sizes wherever DeepSpeed 0.19.8 keeps a copy."""
    engine._config.train_micro_batch_size_per_gpu = micro_batch_size
    engine.set_train_batch_size(batch_size)
    # The boundary of a step is counted from micro_steps modulo the new number of micro-batches, nothing else reads it.
    engine.micro_steps = 0
    if hasattr(engine, "micro_batch_size"):
        engine.micro_batch_size = micro_batch_size  # PipelineEngine's own
    for name in ("tput_timer", "batch_timer"):
        if hasattr(engine, name):
            getattr(engine, name).batch_size = batch_size
    if isinstance(getattr(engine.optimizer, "gradient_accumulation_steps", None), int):  # ZeRO's, read with CPU offload
        engine.optimizer.gradient_accumulation_steps = engine.gradient_accumulation_steps()


def _is_pipeline(engine: Any) -> bool:
    return hasattr(engine, "is_first_stage")


def _replicas(engine: Any) -> int:
    """Return the number of replicas that share the data: those of the shape in which loaders were made."""
    return int(engine.start_shape.replicas if hasattr(engine, "start_shape") else engine.dp_world_size)


def _reads_data(engine: Any) -> bool:
    if hasattr(engine, "reads_data"):
        return bool(engine.reads_data)
    return not _is_pipeline(engine) or engine.is_first_stage() or engine.is_last_stage()
