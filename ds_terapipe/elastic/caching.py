"""Caching of the outputs of frozen layers by sample, in the stage that they form."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed

from ds_terapipe.elastic.cache.outputs import Counts
from ds_terapipe.elastic.cache.session import CacheSession
from ds_terapipe.elastic.cache.stage import CachedStage
from ds_terapipe.elastic.moves.layers import names_in
from ds_terapipe.elastic.optimizer import layer_dtype
from ds_terapipe.elastic.settings import CacheSettings
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.recording.report import emit
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.schedule import Placement


class OutputCaching:
    """The cache of an engine: from the first placement on that begins with a stage of frozen layers.

    Args:
        settings: the block ``elastic_pipeline.cache``.

    Attributes:
        session: the cache of this process; None before that placement.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self.session: CacheSession | None = None
        self._length: int | None = None  # sequence length of the present phase

    def first_stage(self, engine: Any, placement: Placement) -> Callable[..., Stage]:
        """Return the factory of the model's first stage; collective."""
        if not self._settings.enabled or placement.forward_only in (0, len(placement.stages)):
            return Stage
        if self.session is None:
            self.session = self._open(engine)
            weakref.finalize(engine, self.session.close)
        return partial(CachedStage, session=self.session)

    def _open(self, engine: Any) -> CacheSession:
        tensor = engine.grid.get_slice_parallel_rank() if engine.grid.model_parallel_size > 1 else 0
        precision = f"{layer_dtype(engine)} {engine.torch_autocast_enabled()}"
        flags = f"{precision} {tensor} of {engine.grid.model_parallel_size}"
        run = engine._consensus.decide(lambda: secrets.token_hex(8))
        say = emit if engine.global_rank == 0 else _nobody_hears
        watchdog = engine._watchdog
        return CacheSession(
            self._settings, run, engine.device, flags, _agreement(engine), say, lambda: bool(watchdog.ended)
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager around reading a step; entries stay if an error in it ends the process."""
        session = self.session
        if session is not None:
            session.failed = True
        yield
        if session is not None:
            session.failed = False

    def record_inputs(self, items: Sequence[Any]) -> None:
        """Note the inputs of the next step's micro-batches."""
        if self.session is not None:
            self.session.pulled = [item[0] for item in items if isinstance(item, (tuple, list)) and len(item)]

    def enter_evaluation(self, engine: Any) -> None:
        """Put the layers of a cached stage into evaluation mode: their outputs are those of all epochs."""
        stage = engine._runtime.stages.get(0)
        if isinstance(stage, CachedStage):
            prefix = names_in(engine.module, range(len(stage.layers.functions)))
            for name, layer in ModelChunks(engine.module).layers.items():
                if name in prefix:
                    layer.eval()

    def follow_phase(self, engine: Any) -> None:
        """Drop the entries if the phase has another sequence length."""
        length = engine.lr_scheduler.phase.seq_length
        if self.session is not None and length != self._length:
            self.session.forget()
        self._length = length

    @property
    def counts(self) -> Counts:
        """Counts of samples that this rank has read and computed since the last change of frozen layers."""
        cache = None if self.session is None else self.session.cache
        return Counts() if cache is None else cache.counts

    def forward_seconds(self, forward: Sequence[float], frozen: int) -> list[float]:
        """Return the forward seconds of the entries, 0 for the first ``frozen`` ones if their outputs are cached."""
        kept = self._settings.enabled and (self.session is None or self.session.wanted)
        return [0.0 if kept and entry < frozen else seconds for entry, seconds in enumerate(forward)]

    # --------------------------------------------------------------------------------------------------------------- end

    def close(self, ended: bool) -> None:
        """Close the cache, and delete its entries if the training has ended and no exception is propagating; idempotent."""
        if self.session is not None:
            self.session.done = ended
            self.session.close()

    def state(self) -> dict[str, Any] | None:
        """Return the names under which entries are found again, for a checkpoint."""
        return None if self.session is None else {"run": self.session.run, "levels": self.session.levels}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on with the entries of a checkpoint's run."""
        session = self.session
        if state is not None and session is not None and session.cache is None:
            session.run, session.levels = str(state["run"]), [int(count) for count in state["levels"]]


def _agreement(engine: Any) -> Callable[[int], int]:
    """Return a MIN all-reduce over a stage's tensor-parallel ranks: all of them run its layers, or none."""
    if engine.grid.model_parallel_size == 1:
        return int
    here = weakref.ref(engine)

    def agree(mine: int) -> int:
        engine = here()
        assert engine is not None, "the engine is gone"
        said = torch.tensor([mine], device=engine.device)
        # the present group: NCCL has aborted those of former shapes
        group = engine.grid.slice_proc_group
        with engine._watchdog.waiting("the tensor-parallel ranks to look into their caches"):
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MIN, group=group)
            return int(said)

    return agree


def _nobody_hears(line: str) -> None:
    pass
