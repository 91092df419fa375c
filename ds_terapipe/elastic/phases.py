"""``MixedBatch`` with a changing shape: batch, micro-batch and reading follow its phases in any shape."""

from __future__ import annotations

from typing import Any

from ds_terapipe.elastic.data import ElasticData
from ds_terapipe.elastic.policies.resize import shape_of
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch, set_batch
from ds_terapipe.optim.schedules.phases import micro_batch_sizes


class ElasticPhases(ElasticData):
    """Part of the engine: applies a phase of ``MixedBatch`` to the starting shape and to the present one."""

    _epochs_at: dict[int, int]  # epochs completed before each of the last two steps, if the batch changes

    def _know_phases(self) -> None:
        """Collect the batches of all phases: (samples of a step, samples of a micro-batch at the start)."""
        self._epochs_at, scheduler = {}, self.lr_scheduler
        self.batches: tuple[tuple[int, int], ...] = ((self.train_batch_size(), self.micro_batch_size),)
        self._has_phases = isinstance(scheduler, MixedBatch)
        if isinstance(scheduler, MixedBatch):
            sizes = micro_batch_sizes(scheduler.phases, self.micro_batch_size)
            self.batches = tuple((p.batch_size, size) for p, size in zip(scheduler.phases, sizes, strict=True))

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads data: every rank with its own loader, else the readers of the starting shape."""
        assert self._redistributor is not None
        return self._loader is not None or self._redistributor.reads

    def follow_phase(self, batch: int, micro_batch: int) -> None:
        """Set the batch from the next step on; `MixedBatch` calls it on every rank, after the datasets' lengths.

        Args:
            batch: samples of a step, over all replicas.
            micro_batch: of a replica of the starting shape, in which the user's iterators read.
        """
        assert self._redistributor is not None
        start = self.start_shape
        self.start_shape = start._replace(
            micro_batch=micro_batch, micro_batches=batch // (start.replicas * micro_batch)
        )
        tensor = self.grid.model_parallel_size
        now = shape_of(self.num_stages, self.world_size, tensor, batch, micro_batch)
        set_batch(self, batch, now.micro_batch)
        self._redistributor.follow(micro_batch)
        self._follow_data()

    def _note_epochs(self, step: int) -> None:
        """Note the completed epochs before a step; they do not follow from the step number if batches differ."""
        if self._loader is not None and self._has_phases:
            last = dict(list(self._epochs_at.items())[-1:])
            self._epochs_at = {**last, step: self._loader.sampler.order.epochs_before(self.global_samples)}

    def _data_state(self) -> dict[str, Any] | None:
        """Return the begin of the epoch and the completed epochs, for a checkpoint."""
        if self._loader is None:
            return None
        order = self._loader.sampler.order
        return {"begin": order.begin, "epoch": order.epoch, "epochs_at": list(self._epochs_at.items())}

    def _load_data_state(self, state: dict[str, Any] | None) -> None:
        if self._loader is not None and state is not None:
            order = self._loader.sampler.order
            order.begin, order.epoch = state["begin"], state["epoch"]
            self._epochs_at = {int(step): int(epochs) for step, epochs in state["epochs_at"]}
