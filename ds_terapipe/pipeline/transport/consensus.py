"""Agreement of all ranks before a step: no rank has failed, and all know the sequence lengths.

The first stage announces one header per step. An error on any rank is raised on every rank, so no rank is left waiting.
A step costs one reduction of a few words, whatever the number of ranks; ranks exchange messages only where they differ.
All runs over a gloo group of its own (host memory, own timeout), whatever the backend of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed

from ds_terapipe.errors import ConfigError, first_line, one_line, shown
from ds_terapipe.job import error_of
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.pipeline.transport.watchdog import PipelineStalled, Watchdog
from ds_terapipe.schedule import Placement

_Made = TypeVar("_Made")
_MOST = 2**62  # lowest value of words that no rank has given


class Header(NamedTuple):
    """Announcement of a step by the first stage: per micro-batch the sequence length and a checksum of its shapes.

    ``everywhere``: the distinct lengths in all pipelines of the job, for decisions of all ranks. ``documents``: those of
    the micro-batches that have several, or padding. ``is_new``: whether a micro-batch, in any pipeline, is of a kind that
    has not been verified.
    """

    lengths: tuple[int, ...]
    signatures: tuple[int, ...]
    everywhere: tuple[int, ...] = ()
    documents: Mapping[int, Documents] = MappingProxyType({})
    is_new: bool = False


class Consensus:
    """Agreement of a job whose waits are bounded and explained.

    Args:
        watchdog: bounds the waits; its job are the ranks that agree.
        pipelines: global ranks of every pipeline of the job, by place; none before there is an engine.
        config_hash: hash of everything that must be the same on all ranks.

    ``group`` is a gloo group of all ranks, whose operations end in time. Values are in the order of the job's ranks.
    """

    def __init__(self, watchdog: Watchdog, pipelines: Sequence[Sequence[int]] = (), config_hash: int = 0) -> None:
        self.watchdog, self.job, self.config_hash = watchdog, watchdog.job, config_hash
        self.group = self.new_group()
        self.set_pipelines(pipelines)

    def new_group(self, ranks: Sequence[int] | None = None) -> Any:
        """Make a gloo group of some ranks, whose operations end in time; None: of all; collective over all."""
        return self.job.new_group(ranks, self.watchdog.timeout_s, backend="gloo")

    def set_pipelines(self, pipelines: Sequence[Sequence[int]]) -> None:
        """Replace the job's pipelines, see the class."""
        self._pipelines = [list(ranks) for ranks in pipelines]
        self._mine = next((ranks for ranks in self._pipelines if self.job.rank in ranks), [])

    def announce(
        self,
        placement: Placement,
        header: Header | None,
        micro_batches: int,
        error: BaseException | None = None,
        weighs: bool | None = None,
    ) -> Header:
        """Exchange the header of a step; collective.

        Args:
            placement: placement of the model's stages.
            header: this rank's data; the first stage's counts, the last stage's must agree.
            micro_batches: number of micro-batches in the step.
            error: error of this rank while it prepared the step.
            weighs: whether the loss has a weight for the step; None on ranks that do not know.

        Returns:
            The header of this rank's pipeline.

        Raises:
            The error of the rank that has one, on every rank; ConfigError when the ranks' configurations differ, or the
            lengths of inputs and labels, or where only some replicas have a weight.
        """
        header = header or Header((0,) * micro_batches, (0,) * micro_batches)
        is_first = self.job.rank == self._mine[placement.first_place]
        uniform = len(set(zip(header.lengths, header.signatures, strict=True))) <= 1
        # other stages than the first give only lengths, if they know them
        lengths = set(header.lengths) - {0}
        signatures = set(header.signatures) if is_first else set()
        weights = set() if weighs is None else {1 + int(weighs)}
        words: list[Set[int]] = [{error is not None}, {self.config_hash}, {micro_batches}, {not uniform}]
        words += [lengths, signatures, weights, {is_first and bool(header.documents)}, {header.is_new}]
        lows, highs = self._extremes(words, "all ranks to start the step")
        if highs[0]:
            self._agree(error)
        if lows[1:3] != highs[1:3]:
            self._raise_different(micro_batches)
        if highs[6] and lows[6] != highs[6]:
            raise ConfigError(
                "loss_fn.step_weight: got None on some replicas and a weight on others, must be one or the other on all, use "
                "a weight of 0 where no label counts"
            )
        documents: Mapping[int, Documents] = {}
        if highs[7]:
            documents = self._share_documents(dict(header.documents), self._mine[placement.first_place])
        if lows[3:6] == highs[3:6] and uniform:
            same, alike = (highs[4],) * micro_batches, (highs[5],) * micro_batches
            return Header(same, alike, (highs[4],), documents, bool(highs[8]))
        said = self.gather((header.lengths, header.signatures), "all ranks to announce their sequence lengths")
        headers = {rank: Header(*of_rank) for rank, of_rank in zip(self.job.ranks, said, strict=True)}
        for ranks in self._pipelines:  # every rank checks every pipeline: all raise, or none
            check_labels(headers[ranks[placement.first_place]].lengths, headers[ranks[placement.last_place]].lengths)
        firsts = [ranks[placement.first_place] for ranks in self._pipelines]
        everywhere = {length for rank in firsts for length in headers[rank].lengths}
        mine = headers[self._mine[placement.first_place]]
        return mine._replace(everywhere=tuple(sorted(everywhere)), documents=documents, is_new=bool(highs[8]))

    def _share_documents(self, documents: Mapping[int, Documents], first: int) -> Mapping[int, Documents]:
        """Return the documents of this pipeline's micro-batches; its rank ``first`` sends them, others receive."""
        with self.watchdog.waiting("the documents of the first stage"):
            if self.job.rank != first:
                received: list[Any] = [{}]
                torch.distributed.recv_object_list(received, first, group=self.group)
                return cast(Mapping[int, Documents], received[0])
            for rank in self._mine:
                if rank != first:
                    torch.distributed.send_object_list([documents], rank, group=self.group)
            return documents

    def agree(self, error: BaseException | None) -> None:
        """Raise any rank's error on every rank; collective."""
        if self.failures(error)[0]:
            self._agree(error)

    def failures(
        self, error: BaseException | None, took_part: bool = True, patience_s: float | None = None
    ) -> tuple[bool, bool]:
        """Return whether any rank has failed, and whether all that took part have; collective.

        Args:
            error: this rank's error.
            took_part: whether this rank could have failed.
            patience_s: longest wait of a rank that has failed; None: ``timeout_s``.

        Raises:
            PipelineStalled: if the others do not come. They may wait for this rank in a collective of the layers.
        """
        words: list[Set[int]] = [{error is not None} if took_part else set()]
        try:
            lows, highs = self._extremes(words, "all ranks to look at the model", patience_s if error else None)
        except PipelineStalled as stalled:
            if error is None:
                raise
            raise PipelineStalled(f"{one_line(error)}; this rank alone: {first_line(stalled)}") from error
        return highs[0] > 0, lows[0] == 1

    def together(self, make: Callable[[], _Made]) -> _Made:
        """Return the result of ``make``, or raise any rank's error of it on every rank; collective."""
        made: list[_Made] = []
        self.agree(error_of(lambda: made.append(make())))
        return made[0]

    def decide(self, decision: Callable[[], Any]) -> Any:
        """Return the first rank's decision on every rank, or raise its error there; collective."""
        made: list[Any] = []
        self.agree(error_of(lambda: made.append(decision())) if self.job.is_first else None)
        said = made or [None]
        with self.watchdog.waiting("the first rank to decide"):
            torch.distributed.broadcast_object_list(said, self.job.ranks[0], group=self.group)
        return said[0]

    def gather(self, value: Any, what: str = "the figures of all ranks", counts: bool = True) -> list[Any]:
        """Gather any value of every rank; collective. ``what``, ``counts``: see :meth:`Watchdog.waiting`."""
        with self.watchdog.waiting(what, counts=counts):
            return self.job.gather(value, self.group)

    def _raise_different(self, micro_batches: int) -> NoReturn:
        """Raise for ranks with different settings, or numbers of micro-batches; collective."""
        rows = self.gather((self.config_hash, micro_batches), "all ranks to say how they are configured")
        rank, row = next((rank, row) for rank, row in zip(self.job.ranks, rows, strict=True) if row != rows[0])
        if row[0] != rows[0][0]:
            raise ConfigError(
                f"token_pipeline: got other settings on rank {rank} than on rank 0, must be the same on all, use one file"
            )
        raise ConfigError(
            f"gradient_accumulation_steps: got {row[1]} micro-batches on rank {rank} and {rows[0][1]} on rank 0, must be the "
            "same on all, use one file"
        )

    def _extremes(
        self, words: Sequence[Set[int]], what: str, limit_s: float | None = None
    ) -> tuple[list[int], list[int]]:
        """Return the lowest and the highest of each word over all ranks, which may have none or several; collective.

        ``limit_s``: longest wait; None: ``timeout_s``.
        """
        lows, highs = [-min(word, default=_MOST) for word in words], [max(word, default=0) for word in words]
        both = torch.tensor([*lows, *highs], dtype=torch.int64)
        with self.watchdog.waiting(what):
            work = torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=self.group, async_op=True)
            work.wait(timedelta(seconds=limit_s or 0))  # 0: no limit beside the group's own
        return (-both[: len(words)]).tolist(), both[len(words) :].tolist()

    def _agree(self, error: BaseException | None) -> None:
        self.job.agree(error, partial(self.gather, what="the errors of the other ranks"))


def check_labels(inputs: Sequence[int], labels: Sequence[int]) -> None:
    """Raise ConfigError for labels of other lengths than the inputs; 0, or none, if they are not cut."""
    if any(labels) and [*labels] != [*inputs]:
        got, wanted = (shown(sorted(set(lengths))) for lengths in (labels, inputs))
        raise ConfigError(
            f"token_pipeline.cut: got labels of {got} tokens for inputs of {wanted}, must be the same, use e.g. "
            '"cut": {"labels": [1]} if another dimension is the sequence'
        )
