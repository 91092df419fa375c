"""Engine that freezes layers during training, and moves the others to fewer stages and more replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from torch import Tensor

from ds_terapipe.elastic.controller import ElasticController
from ds_terapipe.elastic.data import agree_on
from ds_terapipe.elastic.moves.layers import leave_loss
from ds_terapipe.elastic.policies.resize import Shape
from ds_terapipe.elastic.settings import ElasticPipelineConfig, check_alike
from ds_terapipe.job import Job
from ds_terapipe.pipeline.ended import refuse_ended
from ds_terapipe.pipeline.engine import TokenPipelineEngine


class ElasticPipelineEngine(TokenPipelineEngine):
    """A :class:`TokenPipelineEngine` that freezes layers and reshapes its pipeline at step boundaries.

    Its controller decides and changes; this class only makes that public.

    Args:
        elastic_pipeline: the block of the same name.
        token_pipeline: the block ``token_pipeline``, or one slice if there is none.
        *args, **kwargs: as for ``PipelineEngine``, which ``deepspeed.initialize`` passes.
    """

    continues_data = True
    _controller: ElasticController

    def __init__(self, *args: Any, elastic_pipeline: ElasticPipelineConfig, **kwargs: Any) -> None:
        arguments = {k: value for k, value in kwargs.items() if k not in ("token_pipeline", "model_parameters")}
        check_alike(Job.current().gather(elastic_pipeline.model_dump()))  # before all that depends on it
        agree_on(Job.current(), "training_data", kwargs.get("training_data"))
        leave_loss(kwargs["model"])
        super().__init__(*args, controller=ElasticController(elastic_pipeline, arguments), **kwargs)
        self._controller.start(self)

    elastic_pipeline = property(
        attrgetter("_controller.settings"),
        doc="The block ``elastic_pipeline``, without moves if this model or optimizer does not allow them.",
    )
    start_shape = property(
        attrgetter("_controller.data.start_shape"),
        doc="Shape of the launch, in which the user's iterators read; a phase changes its batch.",
    )
    frozen_layers = property(
        attrgetter("_controller.freezing.frozen"),
        doc="Number of entries of the layer list, from the first on, that the policy has frozen.",
    )
    untrained_layers = property(
        attrgetter("_controller.untrained"),
        doc="Number of entries of the layer list, from the first on, that the user has frozen.",
    )
    cache_counts = property(
        attrgetter("_controller.caching.counts"),
        doc="Counts of samples that this rank has read and computed since the last change of frozen layers.",
    )
    reads_data = property(
        attrgetter("_controller.data.reads"),
        doc="Whether this rank reads data: every rank with its own loader, else the readers of the starting shape.",
    )

    @property
    def shape(self) -> Shape:
        """Present stages, replicas, micro-batch size and micro-batches of a replica."""
        return Shape(self.num_stages, self.dp_world_size, self.micro_batch_size, self.micro_batches)

    def on_reshape(self, callback: Callable[[ElasticPipelineEngine], None]) -> None:
        """Call ``callback`` with the engine after each reshape."""
        self._controller.mover.on_reshape.append(callback)

    def follow_phase(self, batch: int, micro_batch: int) -> None:
        """Set the batch from the next step on; `MixedBatch` calls it on every rank, after the datasets' lengths.

        Args:
            batch: samples of a step, over all replicas.
            micro_batch: of a replica of the starting shape, in which the user's iterators read.
        """
        self._controller.follow_phase(self, batch, micro_batch)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the batch from the next step on, also between changes of shape; see ``PipelineEngine``."""
        data = self._controller.data
        data.check_batch(train_batch_size)
        # the one that this shape would have from the start with such a batch: the launch's need not divide a replica's share
        self.micro_batch_size = data.shape_with(self, self.num_stages, train_batch_size).micro_batch
        self._config.train_micro_batch_size_per_gpu = self.micro_batch_size
        super().set_train_batch_size(train_batch_size)
        data.follow_batch(self)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the micro-batch of a replica, here and of the readers of the starting shape; the number of them stays."""
        batch = micro_batch_size * self.micro_batches * self.dp_world_size
        self._controller.follow_micro_batch(self, batch, micro_batch_size)

    def set_dataiterator(self, iterator: Any) -> None:
        """Set the iterator, on every rank; the starting shape decides which ranks read."""
        self.data_iterator = iterator

    def _build_data_iter(self, dataset: Any) -> None:
        self._controller.data.build_loader(self, dataset)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train a batch, in the shape and with the frozen layers that the policies choose for this step."""
        refuse_ended(self)
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self._controller.before_step(self)
        with self._controller.around_step(self):
            loss = super().train_batch()
        self._controller.freezing.record_loss(loss)
        return loss

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
        with self._controller.data.evaluating(self, num_micro_batches) as count:
            return super().eval_batch(data_iter, return_logits, compute_loss, reduce_output, bcast_loss, count)

    def evaluate(self, dataset: Any) -> float:
        """Return the mean loss over a dataset, whose samples are evaluated once each, in any shape; collective.

        The mean over micro-batches is weighted by their numbers of samples.

        Args:
            dataset: with ``__getitem__`` and ``__len__``, on every rank; collated as ``training_data`` is.

        Raises:
            ConfigError: it is empty.
        """
        return self._controller.data.evaluate(self, dataset)
