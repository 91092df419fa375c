"""Data of an engine that changes its shape: from its own loader, or from iterators on the starting ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset

from ds_terapipe.elastic.policies.resize import Shape, shape_of
from ds_terapipe.elastic.redistribute import Ranks, redistributed
from ds_terapipe.elastic.sampler import ElasticBatchSampler, ElasticLoader, MicroBatches, evaluation_micro_batches
from ds_terapipe.elastic.settings import ELASTIC_PIPELINE, DataSettings
from ds_terapipe.errors import bad_value
from ds_terapipe.job import Job
from ds_terapipe.optim.schedules.mixed_batch import MixedBatch, set_batch
from ds_terapipe.optim.schedules.phases import micro_batch_sizes
from ds_terapipe.overrides import replaced
from ds_terapipe.pipeline.transport.consensus import Consensus

logger = logging.getLogger(__name__)


class ElasticData:
    """Delivers micro-batches to the ranks that need them in the present shape, in all phases of ``MixedBatch``.

    Args:
        settings: the block ``elastic_pipeline.data``.

    Attributes:
        loader: the engine's own loader of its ``training_data``, if it has some.
        start_shape: shape of the launch, for which the user's iterators are made; a phase changes its batch.
        batches: of all phases: (samples of a step, samples of a micro-batch at the start).
    """

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self.loader: ElasticLoader | None = None
        self._reads_here = False  # every rank that needs data has its own iterator
        self._alike = False  # every replica evaluates the same
        self._epochs_at: dict[int, int] = {}  # epochs completed before each of the last two steps

    def build_loader(self, engine: Any, dataset: Any) -> None:
        """Make the engine's loader, which goes on in another shape where it was."""
        sampler = ElasticBatchSampler(
            len(dataset), engine.train_batch_size(), micro_batch=engine.micro_batch_size, replicas=engine.dp_world_size,
            replica=engine.grid.get_data_parallel_rank(), shuffle=self._settings.shuffle, seed=self._settings.seed,
        )  # fmt: skip
        on_device = engine.device.type == "cuda"
        workers = 2 if on_device else 0  # 2 as DeepSpeed's
        self.loader = ElasticLoader(dataset, sampler, engine.collate_fn, workers, on_device)
        engine.training_dataloader = engine.data_iterator = self.loader

    def start(self, engine: Any) -> None:
        """Record the shape of the launch, and the batches of the scheduler's phases; collective."""
        self._start = Ranks.of(engine)
        given, scheduler = self._settings, engine.lr_scheduler
        if engine.training_data is None and given.model_fields_set and engine.global_rank == 0:
            names = ", ".join(sorted(given.model_fields_set))
            logger.warning(
                "%s: got %s without training_data, does nothing; give deepspeed.initialize training_data",
                given.PATH,
                names,
            )
        self.start_shape: Shape = engine.shape
        self.batches: tuple[tuple[int, int], ...] = ((engine.train_batch_size(), engine.micro_batch_size),)
        if isinstance(scheduler, MixedBatch):
            sizes = micro_batch_sizes(scheduler.phases, engine.micro_batch_size)
            self.batches = tuple((p.batch_size, size) for p, size in zip(scheduler.phases, sizes, strict=True))

    # ----------------------------------------------------------------------------------------------------------- reading

    def read(
        self, engine: Any, pull: Callable[[], Any], micro_batches: int, by_rank: Callable[..., list[Any]]
    ) -> list[Any]:
        """Read micro-batches: from this rank's own iterator with ``by_rank``, or from those of the starting shape."""
        here = self._reads_here or (self.loader is not None and engine.data_iterator is self.loader)
        if here or engine.shape == self.start_shape:
            return by_rank(engine, pull, micro_batches)
        return redistributed(engine, self._start, micro_batches, pull, self._alike)

    @property
    def reads(self) -> bool:
        """Whether this rank reads data: every rank with its own loader, else the readers of the starting shape."""
        return self.loader is not None or self._start.read_here

    @contextmanager
    def evaluating(self, engine: Any, micro_batches: int | None) -> Iterator[int | None]:
        """Context manager around an evaluation; gives the number of micro-batches of a replica in the present shape.

        The ranks of the starting shape read the same number of micro-batches as there. If these cannot be divided
        equally, every replica evaluates all of them.
        """
        start, alike = self.start_shape, False
        if not self._reads_here and engine.shape != start:
            read = start.micro_batches if micro_batches is None else micro_batches
            of_now = engine.micro_batch_size * engine.dp_world_size
            micro_batches, rest = divmod(read * start.micro_batch * start.replicas, of_now)
            if rest:
                alike, micro_batches = True, read * start.replicas
        with replaced(self, _alike=alike):
            yield micro_batches

    def evaluate(self, engine: Any, dataset: Any) -> float:
        """Return the mean loss over a dataset; see ``ElasticPipelineEngine.evaluate``."""
        samples = agree_on(engine._consensus, "evaluate", dataset)
        replica, total = engine.grid.get_data_parallel_rank(), 0.0
        read, count = MicroBatches(dataset, engine.collate_fn, self._settings.seed), engine.micro_batches
        with replaced(self, _reads_here=True):
            for weight, parts in evaluation_micro_batches(
                samples, engine.micro_batch_size, engine.dp_world_size, replica
            ):
                for first in range(0, len(parts), count):
                    some = parts[first : first + count]
                    batches = (read[part[0], part] for part in some)
                    total += float(engine.eval_batch(batches, num_micro_batches=len(some))) * weight * len(some)
        return total / samples

    # ----------------------------------------------------------------------------------------------------------- changes

    def follow_shape(self, engine: Any) -> None:
        """Have the loader go on in the engine's present shape."""
        if self.loader is not None:
            self.loader.reshape(
                engine.train_micro_batch_size_per_gpu(), engine.dp_world_size, engine.grid.get_data_parallel_rank(),
                engine.global_samples, engine.train_batch_size(),
            )  # fmt: skip

    def go_back(self, engine: Any) -> None:
        """Have the engine's loader read the samples of a step that has not begun again, if it was reading."""
        if self.loader is not None and engine.data_iterator is self.loader:
            self.follow_shape(engine)

    def shape_with(self, engine: Any, stages: int, batch: int | None = None) -> Shape:
        """Return the shape with so many stages; ``batch``: by default the present one."""
        batch = engine.train_batch_size() if batch is None else batch
        processes, tensor = engine.world_size, engine.grid.model_parallel_size
        return shape_of(stages, processes, tensor, batch, self.start_shape.micro_batch)

    def follow_phase(self, engine: Any, batch: int, micro_batch: int) -> None:
        """Set the batch from the next step on; see ``ElasticPipelineEngine.follow_phase``."""
        self.check_batch(batch, micro_batch)
        self.start_shape = self.start_shape._replace(micro_batch=micro_batch)
        self._start = replace(self._start, micro_batch=micro_batch)
        set_batch(engine, batch, self.shape_with(engine, engine.num_stages, batch).micro_batch)

    def check_batch(self, batch: int, micro_batch: int | None = None) -> None:
        """Refuse a batch that the readers of the starting shape cannot read in whole micro-batches. Raises ConfigError."""
        replicas, micro_batch = self.start_shape.replicas, micro_batch or self.start_shape.micro_batch
        if batch % (replicas * micro_batch):
            must = f"a multiple of {replicas} replicas x micro-batch {micro_batch} of the launch"
            raise bad_value("set_train_batch_size", batch, must, "one that is")

    def follow_batch(self, engine: Any) -> None:
        """Have the readers of the starting shape, and the loader, go on with the engine's present batch."""
        start, batch = self.start_shape, engine.train_batch_size()
        self.start_shape = start._replace(micro_batches=batch // (start.replicas * start.micro_batch))
        self.follow_shape(engine)

    # ------------------------------------------------------------------------------------------------------------ epochs

    def note_epochs(self, engine: Any) -> None:
        """Note the completed epochs before a step; they do not follow from the step number if batches differ."""
        if self.loader is not None:
            last = dict(list(self._epochs_at.items())[-1:])
            completed = self.loader.sampler.order.epochs_before(engine.global_samples)
            self._epochs_at = {**last, engine.global_steps: completed}

    def epochs_before(self, engine: Any, step: int) -> int:
        """Return the completed epochs before a step: the noted ones, or those of steps of the present batch."""
        of_batches: int = step * engine.train_batch_size() // len(engine.training_data)
        return self._epochs_at.get(step, of_batches)

    def state(self) -> dict[str, Any] | None:
        """Return the begin of the epoch, its samples and the completed epochs, for a checkpoint."""
        if self.loader is None:
            return None
        order, epochs_at = self.loader.sampler.order, list(self._epochs_at.items())
        return {"begin": order.begin, "epoch": order.epoch, "samples": order.samples, "epochs_at": epochs_at}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore the state of a checkpoint; a dataset of another length begins an epoch."""
        if self.loader is not None and state is not None:
            self.loader.sampler.resume(state["begin"], state["epoch"], state.get("samples"))
            self._epochs_at = {int(step): int(epochs) for step, epochs in state["epochs_at"]}

    def close(self) -> None:
        """End the loader's workers."""
        if self.loader is not None:
            self.loader.close()


def agree_on(ranks: Job | Consensus, key: str, dataset: Any) -> int:
    """Return the number of samples of a dataset that all ranks have, 0 if none has one; collective.

    Args:
        ranks: of the job.
        key: beginning of the error message.
        dataset: this rank's.

    Raises:
        ConfigError: on every rank, for other numbers on some ranks, or samples without numbers, as of an ``IterableDataset``.
    """
    found = ranks.gather(None if dataset is None else _samples_in(dataset))
    for rank, samples in enumerate(found):
        if isinstance(samples, str):
            must = f"a dataset with __len__ and __getitem__ beside {ELASTIC_PIPELINE} (steps know samples by number)"
            raise bad_value(key, samples, must, "one, a list, or an iterator of micro-batches in place of a dataset")
        if samples == 0:
            raise bad_value(key, 0, "a dataset of one sample or more", "another dataset")
        if samples != found[0]:
            raise bad_value(
                key, f"{samples} samples on rank {rank} and {found[0]} on rank 0", "the same on all ranks",
                "the whole dataset on each (replicas share it)",
            )  # fmt: skip
    return found[0] or 0


def _samples_in(dataset: Any) -> int | str:
    """Return the number of samples; the dataset's class if they cannot be numbered."""
    numbered = all(hasattr(dataset, each) for each in ("__len__", "__getitem__"))
    return len(dataset) if numbered and not isinstance(dataset, IterableDataset) else type(dataset).__name__
