"""Data of an engine that changes its shape: from its own loader, or from iterators on the starting ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any

from torch.utils.data import default_collate

from ds_terapipe.elastic.policies.resize import Shape
from ds_terapipe.elastic.redistribute import BatchRedistributor, Ranks
from ds_terapipe.elastic.sampler import ElasticBatchSampler, ElasticLoader, evaluation_micro_batches
from ds_terapipe.elastic.settings import ElasticPipelineConfig
from ds_terapipe.errors import bad_value
from ds_terapipe.pipeline.engine import TokenPipelineEngine

logger = logging.getLogger(__name__)


class ElasticData(TokenPipelineEngine):
    """Part of the engine: delivers micro-batches to the ranks that need them in the present shape."""

    continues_data = True
    elastic_pipeline: ElasticPipelineConfig
    _redistributor: BatchRedistributor | None = None
    _loader: ElasticLoader | None = None
    _reads_here = False  # every rank that needs data has its own iterator
    _alike = False  # every replica evaluates the same

    def _start_feeding(self) -> None:
        """Record the shape of the launch, for which the user's iterators are made."""
        self._redistributor = BatchRedistributor(self._ranks(), self._consensus, self._watchdog)
        given = self.elastic_pipeline.data
        if self.training_data is None and given.model_fields_set and self.global_rank == 0:
            names = ", ".join(sorted(given.model_fields_set))
            logger.warning(
                "%s: got %s without training_data, does nothing; give deepspeed.initialize training_data",
                given.PATH,
                names,
            )
        self.start_shape: Shape = self.shape

    @property
    def shape(self) -> Shape:
        """Present stages, replicas, micro-batch size and micro-batches of a replica."""
        return Shape(self.num_stages, self.dp_world_size, self.micro_batch_size, self.micro_batches)

    def _ranks(self) -> Ranks:
        return Ranks(self.module._topo, self.micro_batch_size)

    def set_dataiterator(self, iterator: Any) -> None:
        """Set the iterator, on every rank; the starting shape decides which ranks read."""
        self.data_iterator = iterator

    def _read(self, micro_batches: int) -> list[Any]:
        here = self._reads_here or (self._loader is not None and self.data_iterator is self._loader)
        if here or self._redistributor is None or self.shape == self.start_shape:
            return super()._read(micro_batches)
        return self._redistributor.read(micro_batches, self._ranks(), self._next_batch, alike=self._alike)

    def _build_data_iter(self, dataset: Any) -> None:
        settings = self.elastic_pipeline.data
        sampler = ElasticBatchSampler(
            len(dataset), self.train_batch_size(), micro_batch=self.micro_batch_size, replicas=self.dp_world_size,
            replica=self.grid.get_data_parallel_rank(), shuffle=settings.shuffle, seed=settings.seed,
        )  # fmt: skip
        workers = 2 if self.device.type == "cuda" else 0  # 2 as DeepSpeed's
        self._loader = ElasticLoader(dataset, sampler, self.collate_fn, workers, self.device.type == "cuda")
        self.training_dataloader = self.data_iterator = self._loader

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate a batch, see ``PipelineEngine.eval_batch``.

        The ranks of the starting shape read the same number of micro-batches as there. If these cannot be divided
        equally, every replica evaluates all of them.
        """
        assert self._redistributor is not None
        if not self._reads_here and self.shape != self.start_shape:
            read = self.start_shape.micro_batches if num_micro_batches is None else num_micro_batches
            num_micro_batches = self._redistributor.share(read, self._ranks())
            self._alike = num_micro_batches is None
            if num_micro_batches is None:
                num_micro_batches = read * self.start_shape.replicas
        try:
            return super().eval_batch(
                data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
            )
        finally:
            self._alike = False

    def evaluate(self, dataset: Any) -> float:
        """Return the mean loss over a dataset, whose samples are evaluated once each, in any shape; collective.

        The mean over micro-batches is weighted by their numbers of samples.

        Args:
            dataset: with ``__getitem__`` and ``__len__``, on every rank; collated as ``training_data`` is.

        Raises:
            ConfigError: it is empty.
        """
        if not len(dataset):
            raise bad_value("evaluate", 0, "a dataset of one sample or more", "another dataset")
        replica, total = self.grid.get_data_parallel_rank(), 0.0
        parts = evaluation_micro_batches(len(dataset), self.micro_batch_size, self.dp_world_size, replica)
        collate = self.collate_fn or default_collate
        self._reads_here = True
        try:
            for (_, weight), alike in groupby(parts, key=lambda part: (len(part.indices), part.weight)):
                for some in _batched(alike, self.micro_batches):
                    batches = (collate([dataset[index] for index in part.indices]) for part in some)
                    total += float(self.eval_batch(batches, num_micro_batches=len(some))) * weight * len(some)
        finally:
            self._reads_here = False
        return total / len(dataset)

    def _follow_data(self) -> None:
        if self._loader is not None:
            replica = self.grid.get_data_parallel_rank()
            self._loader.reshape(
                self.micro_batch_size, self.dp_world_size, replica, self.global_samples, self.train_batch_size()
            )

    def _release(self) -> None:
        super()._release()
        if self._loader is not None:
            self._loader.close()


def _batched(parts: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Split an iterable into lists of ``size``: ``itertools.batched``, which Python 3.11 does not have."""
    parts = iter(parts)
    while some := list(islice(parts, size)):
        yield some
