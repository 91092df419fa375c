"""DeepSpeed's loader of training data, recut in the middle of an epoch: batch size or sequence length.

A ``DeepSpeedDataLoader`` gives the batch size to a PyTorch loader whose worker processes read ahead and hold copies of
the data set. A new size or length needs a new loader, which starts at the first sample that was not delivered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.utils.data.distributed import DistributedSampler


class TrainingLoader:
    """Takes over a ``DeepSpeedDataLoader``; its iterators yield batches of the new size from the next one on.

    An epoch's order is the sampler's, whatever the batch sizes: a change neither loses nor repeats a sample. If it
    changes the data set's number of samples (documents cut into pieces), the epoch restarts.

    Args:
        loader: the loader of ``engine.deepspeed_io``, or a ``RepeatingLoader`` around it.

    Attributes:
        delivered: samples of this epoch that this replica has got.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = innermost(loader)
        self._create = self._loader._create_dataloader
        self._started = self._loader.data is not None
        self._order: list[Any] | None = None
        self.delivered = self._first = 0
        self._samples = len(self.dataset)
        self._loader._create_dataloader = self._begin_epoch  # DeepSpeed's __iter__ calls it

    @property
    def dataset(self) -> Any:
        """The data set that the loader reads."""
        return self._loader.dataset

    def recut(self, micro_batch_size: int) -> None:
        """From the next batch on, ``micro_batch_size`` samples each, as the data set makes them now."""
        loader = self._loader
        # more than one device in DeepSpeed's single-process mode only
        loader.batch_size = micro_batch_size * loader.device_count
        if len(self.dataset) != self._samples:
            self._samples, self.delivered, self._order = len(self.dataset), 0, None
            loader.data_sampler = _resized(loader.data_sampler, self.dataset)
        full, rest = divmod(len(loader.data_sampler), loader.batch_size)
        loader.len = full if loader.dataloader_drop_last else full + (rest > 0)
        if self._started:
            self._read_on()

    def seek(self, delivered: int) -> None:
        """Go on after ``delivered`` samples of this replica, or start there when iterating begins; epochs are left out."""
        delivered %= max(1, len(self._loader.data_sampler))
        if self._started:
            self.delivered = delivered
            self._read_on()
        else:
            self._first = delivered

    def _begin_epoch(self) -> Any:
        self._started, self.delivered, self._first, self._order = True, self._first, 0, None
        return self._read_on()

    def _read_on(self) -> Any:
        loader, sampler = self._loader, self._loader.data_sampler
        if self._order is None:
            self._order = list(sampler)
        rest = self._order[self.delivered :]
        loader.data = None  # ends the worker processes of the loader before it
        loader.data_sampler = rest
        try:
            created = self._create()
        finally:
            loader.data_sampler = sampler
        loader.data = self._counted(loader.data, loader.batch_size)
        return created

    def _counted(self, batches: Iterator[Any], size: int) -> Iterator[Any]:
        end = len(self._order or ())
        for batch in batches:
            self.delivered = min(self.delivered + size, end)
            yield batch


def innermost(loader: Any) -> Any:
    """The loader inside ``RepeatingLoader``s."""
    while hasattr(loader, "loader"):
        loader = loader.loader
    return loader


def is_deepspeed_loader(loader: Any) -> bool:
    """Whether :class:`TrainingLoader` can take over this loader."""
    return isinstance(innermost(loader), DeepSpeedDataLoader)


def reads_ahead(iterator: Any) -> bool:
    """Whether an iterator is of a PyTorch loader with worker processes, perhaps inside ``RepeatingLoader``s."""
    while hasattr(iterator, "data_iter"):
        iterator = iterator.data_iter
    return getattr(iterator, "_num_workers", 0) > 0


def _resized(sampler: Any, dataset: Any) -> Any:
    """Return a sampler for the data set's new number of samples; samplers that read it each time are kept."""
    if type(sampler) is not DistributedSampler:
        return sampler
    resized: DistributedSampler[Any] = DistributedSampler(
        dataset, sampler.num_replicas, sampler.rank, sampler.shuffle, sampler.seed, sampler.drop_last
    )
    resized.set_epoch(sampler.epoch)
    return resized
