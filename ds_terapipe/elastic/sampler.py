"""Order of samples: a function of a seed and of the samples that the whole job has consumed, in any shape.

Positions count samples through all epochs: position p is in epoch p // samples, at p % samples of that epoch's order. A
step trains the next ``batch`` positions, whatever the number of replicas, so a new shape continues where the old one
stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from ds_terapipe.elastic.draws import mixed, reproducibly
from ds_terapipe.errors import bad_value


class SampleOrder:
    """Order of a dataset's samples: ``order[position]`` is an index.

    Args:
        samples: in the dataset.
        shuffle: whether each epoch has its own order; else all have the dataset's.
        seed: seed of these orders.
        begin, epoch: the position at which an epoch begins, and its number; they change with the dataset's length.

    Raises:
        ConfigError: an empty dataset.
    """

    def __init__(self, samples: int, shuffle: bool, seed: int, begin: int = 0, epoch: int = 0) -> None:
        if samples < 1:
            raise bad_value("training_data", samples, "a dataset of one sample or more", "another dataset")
        self.samples = samples
        self.shuffle = shuffle
        self.seed = seed
        self.begin, self.epoch = begin, epoch
        self._permutations: dict[int, torch.Tensor] = {}

    def __getitem__(self, position: int) -> int:
        epoch, place = self._where(position)
        return int(self._permutation(epoch)[place]) if self.shuffle else place

    def between(self, first: int, end: int) -> list[int]:
        """Return the samples at positions ``first`` to ``end - 1``."""
        return [self[position] for position in range(first, end)]

    def epochs_before(self, position: int) -> int:
        """Return the number of epochs completed at a position."""
        return self._where(position)[0]

    def resized(self, samples: int, position: int) -> SampleOrder:
        """Return the order of a dataset whose length changes at ``position``; an epoch begins there."""
        epoch, place = self._where(position)
        return SampleOrder(samples, self.shuffle, self.seed, position, epoch + (place > 0))

    def _where(self, position: int) -> tuple[int, int]:
        """Return the epoch's number, and the place in its order."""
        epochs, place = divmod(position - self.begin, self.samples)
        return self.epoch + epochs, place

    def _permutation(self, epoch: int) -> torch.Tensor:
        """Return an epoch's permutation [samples]; at most two are kept, since a batch may span two epochs."""
        if epoch not in self._permutations:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            for old in list(self._permutations)[:-1]:
                del self._permutations[old]
            self._permutations[epoch] = torch.randperm(self.samples, generator=generator)
        return self._permutations[epoch]


class ElasticBatchSampler(Sampler[list[int]]):
    """Micro-batches of one replica, as lists of dataset indices, without end.

    Each ``batch`` positions from ``consumed`` on are a step. Replica r has block number r of their ``replicas`` equal
    contiguous blocks, cut into micro-batches in order. Positions of the next epoch follow directly: every sample comes
    exactly once per epoch, and a step may span two epochs.

    For your own loader: ``DataLoader(dataset, batch_sampler=ElasticBatchSampler(...))``. After `reshape`, create a new
    iterator of the loader; old iterators raise RuntimeError.

    Args:
        samples: in the dataset.
        batch: samples of a step, over all replicas: ``train_batch_size``.
        micro_batch: samples in a micro-batch.
        replicas: pipelines that share a batch.
        replica: number of this one, from 0.
        shuffle, seed: as in `SampleOrder`.
        consumed: samples that the whole job has trained before: ``engine.global_samples``.

    Raises:
        ConfigError: a batch that is not made of whole micro-batches of all replicas, or an empty dataset.
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        *,
        micro_batch: int,
        replicas: int = 1,
        replica: int = 0,
        shuffle: bool = False,
        seed: int = 1234,
        consumed: int = 0,
    ) -> None:
        self.order = SampleOrder(samples, shuffle, seed)
        self.batch = batch
        self.reshape(micro_batch, replicas, replica, consumed)

    def reshape(
        self,
        micro_batch: int,
        replicas: int,
        replica: int,
        consumed: int,
        batch: int | None = None,
        samples: int | None = None,
    ) -> None:
        """Continue after ``consumed`` samples in another shape, maybe with another batch. Raises like the constructor.

        If ``samples`` changes, a new epoch begins.
        """
        batch = self.batch if batch is None else batch
        _check(batch, micro_batch, replicas, replica, consumed)
        if samples not in (None, self.order.samples):
            self.order = self.order.resized(int(samples or 0), consumed)
        self.batch = batch
        self.micro_batch, self.replicas, self.replica, self.consumed = micro_batch, replicas, replica, consumed
        self._shape = object()

    def resume(self, begin: int, epoch: int, samples: int | None = None) -> None:
        """Continue in an epoch that began at a position, of a dataset of ``samples``: if it has others now, in the next one."""
        now = self.order.samples
        self.order = SampleOrder(samples or now, self.order.shuffle, self.order.seed, begin, epoch)
        if self.order.samples != now:
            self.order = self.order.resized(now, self.consumed)

    def __iter__(self) -> Iterator[list[int]]:
        return (samples for _, samples in self.placed())

    def placed(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each micro-batch with its first position."""
        shape, step = self._shape, self.consumed
        share = self.batch // self.replicas
        while True:
            first = step + self.replica * share
            for begin in range(first, first + share, self.micro_batch):
                if self._shape is not shape:
                    raise RuntimeError("the sampler has got another shape since: use a new iter() of the loader")
                yield begin, self.order.between(begin, begin + self.micro_batch)
            step += self.batch

    def __len__(self) -> int:
        """Return the micro-batches of an epoch, rounded up; iteration does not end there."""
        return -(-self.order.samples // (self.micro_batch * self.replicas))


def _check(batch: int, micro_batch: int, replicas: int, replica: int, consumed: int) -> None:
    if replicas < 1 or micro_batch < 1 or batch % (replicas * micro_batch):
        rule = f"a multiple of {replicas} replicas x micro-batch {micro_batch}"
        raise bad_value("train_batch_size", batch, rule, "another micro_batch or replicas")
    if not 0 <= replica < replicas:
        raise bad_value("replica", replica, f"from 0 to {replicas - 1}", "the rank among the replicas")
    if consumed < 0:
        raise bad_value("consumed", consumed, "0 or more", "engine.global_samples")


class MicroBatches:
    """Reader of micro-batches of a dataset, by position and samples.

    A dataset or a collate function may draw masks or crops, from generators of the process or its own. The draws follow
    from seed and position. So the first and the last stage draw alike, whatever else their processes draw.

    Args:
        dataset: with ``__getitem__``, or ``__getitems__`` for several samples at once.
        collate_fn: as in ``torch.utils.data.DataLoader``.
        seed: of the draws.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate_fn or default_collate, seed

    def __getitem__(self, key: tuple[int, Sequence[int]]) -> Any:
        position, samples = key
        holders = self._dataset.__getitem__, self._collate
        return reproducibly(mixed(self._seed, position), holders, partial(self._read, samples))

    def _read(self, samples: Sequence[int]) -> Any:
        several = getattr(self._dataset, "__getitems__", None)
        return self._collate([self._dataset[index] for index in samples] if several is None else several(list(samples)))


class ElasticLoader:
    """Micro-batches of a dataset for this replica, without end: iterable and iterator, the same object in every shape.

    Reading changes no global random state, so a reshape does not change later draws.

    Args:
        dataset: with ``__getitem__`` and ``__len__``.
        sampler: chooses the samples.
        collate_fn, num_workers, pin_memory: as in ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticBatchSampler,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self._random = torch.Generator()
        read: Any = MicroBatches(dataset, collate_fn, sampler.order.seed)
        self._loader = partial(
            DataLoader[Any], read, batch_size=None, collate_fn=_as_it_is, num_workers=num_workers,
            pin_memory=pin_memory, generator=self._random,
        )  # fmt: skip
        self._iterator: Iterator[Any] | None = None
        self._closed = False

    def __iter__(self) -> ElasticLoader:
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise RuntimeError("the loader is closed, use it before its engine is destroyed")
        if self._iterator is None:
            # seeds of workers, of which a dataset may make generators of its own
            self._random.manual_seed(mixed(self.sampler.order.seed, self.sampler.consumed, self.sampler.replica))
            keys: Any = self.sampler.placed()
            self._iterator = iter(self._loader(sampler=keys))
        return next(self._iterator)

    def __len__(self) -> int:
        """Number of batches, that of the `ElasticBatchSampler`."""
        return len(self.sampler)

    def reshape(self, micro_batch: int, replicas: int, replica: int, consumed: int, batch: int | None = None) -> None:
        """Continue after ``consumed`` samples of the whole job in another shape, see `ElasticBatchSampler.reshape`.

        Samples that workers have read ahead are dropped, and the workers end. A dataset of another length begins a new
        epoch.
        """
        self.sampler.reshape(micro_batch, replicas, replica, consumed, batch, len(self.dataset))
        self._drop()

    def close(self) -> None:
        """End the workers; later reads raise RuntimeError."""
        self._drop()
        self._closed = True

    def _drop(self) -> None:
        self._iterator = None  # a DataLoader's iterator ends its workers when it is no longer referenced


def evaluation_micro_batches(
    samples: int, micro_batch: int, replicas: int, replica: int
) -> list[tuple[int, list[range]]]:
    """Return the micro-batches with which the replicas together evaluate every sample of a dataset once.

    All replicas have the same number of micro-batches, and the same weights. Full rounds are divided among the
    replicas; all replicas evaluate the rest, less than one micro-batch for each. The mean over the dataset is the
    weighted mean of micro-batches: weight x average over the replicas, summed, divided by the number of samples.

    Args:
        samples: in the dataset.
        micro_batch: samples in a micro-batch.
        replicas: pipelines that evaluate together.
        replica: number of this one, from 0.

    Returns:
        Weights, each with micro-batches of one size: the indices of their samples.
    """
    together = micro_batch * replicas
    shared, whole = samples // together * together, samples // micro_batch * micro_batch
    mine = [range(at, at + micro_batch) for at in range(replica * micro_batch, shared, together)]
    rest = [range(at, at + micro_batch) for at in range(shared, whole, micro_batch)]
    last = [range(whole, samples)] if whole < samples else []
    return [(together, mine), (micro_batch, rest), (samples - whole, last)]


def _as_it_is(micro_batch: Any) -> Any:
    return micro_batch
