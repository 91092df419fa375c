"""Part of an elastic engine that caches the outputs of frozen layers, in the stage that they form."""

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
from ds_terapipe.elastic.freezing import Freezing
from ds_terapipe.elastic.moves.layers import names_in
from ds_terapipe.pipeline.batch import StepBatch
from ds_terapipe.pipeline.layer_list import layers_here
from ds_terapipe.pipeline.recording.report import emit
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.schedule import Placement


class Caching(Freezing):
    """Part of the engine: if the model begins with frozen layers, caches their outputs by sample."""

    _session: CacheSession | None = None
    _length: int | None = None  # sequence length of the present phase

    def _first_stage(self, placement: Placement) -> Callable[..., Stage]:
        settings = self.elastic_pipeline.cache
        if not settings.enabled or not placement.forward_only or placement.forward_only == len(placement.stages):
            return super()._first_stage(placement)
        if self._session is None:
            tensor = self.grid.get_slice_parallel_rank() if self.grid.model_parallel_size > 1 else 0
            precision = f"{self._layer_dtype} {self.torch_autocast_enabled()}"
            flags = f"{precision} {tensor} of {self.grid.model_parallel_size}"
            run = self._consensus.decide(lambda: secrets.token_hex(8))
            self._session = CacheSession(
                settings, run, self.device, flags, self._agreement(), emit if self.global_rank == 0 else _nobody_hears
            )
            weakref.finalize(self, self._session.close)
        return partial(CachedStage, session=self._session)

    def _agreement(self) -> Callable[[int], int]:
        """Return a MIN all-reduce over a stage's tensor-parallel ranks: all of them run its layers, or none."""
        if self.grid.model_parallel_size == 1:
            return int
        here = weakref.ref(self)

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

    def _read(self, micro_batches: int) -> list[Any]:
        pulled = super()._read(micro_batches)
        if self._session is not None:
            self._session.pulled = [item[0] for item in pulled if isinstance(item, (tuple, list)) and len(item)]
        return pulled

    def follow_phase(self, batch: int, micro_batch: int) -> None:
        """Extend ``ElasticPhases.follow_phase``: drop the entries if the sequence length changes."""
        super().follow_phase(batch, micro_batch)
        length = self.lr_scheduler.phase.seq_length
        if self._session is not None and length != self._length:
            self._session.forget()
        self._length = length

    def _enter_training(self) -> None:
        super()._enter_training()
        stage = self._runtime.stages.get(0)
        if isinstance(stage, CachedStage):
            prefix = names_in(self.module, range(len(stage.layers.functions)))
            for name, layer in layers_here(self.module).items():
                if name in prefix:
                    layer.eval()

    @property
    def cache_counts(self) -> Counts:
        """Counts of samples that this rank has read and computed since the last change of frozen layers."""
        cache = None if self._session is None else self._session.cache
        return Counts() if cache is None else cache.counts

    def _without_kept(self, forward: Sequence[float], frozen: int) -> list[float]:
        """Return the forward seconds of the entries, 0 for the first ``frozen`` ones if their outputs are cached."""
        kept = self.elastic_pipeline.cache.enabled and (self._session is None or self._session.wanted)
        return [0.0 if kept and entry < frozen else seconds for entry, seconds in enumerate(forward)]

    def _next_step(self, micro_batches: int) -> StepBatch:
        session = self._session
        if session is not None:
            session.failed = True
        batch: StepBatch = super()._next_step(micro_batches)
        if session is not None:
            session.failed = False
        return batch

    @contextmanager
    def _poison_on_error(self) -> Iterator[None]:
        try:
            with super()._poison_on_error():
                yield
        except BaseException:
            if self._session is not None:
                self._session.keep = True
            raise

    def destroy(self) -> None:
        """Destroy the engine and delete the cache's entries, unless an exception is propagating."""
        if self._session is not None:
            self._session.done = True
        super().destroy()

    def _release(self) -> None:
        super()._release()
        if self._session is not None:
            self._session.close()

    # ------------------------------------------------------------------------------------------------------- checkpoints

    def _cache_state(self) -> dict[str, Any] | None:
        return None if self._session is None else {"run": self._session.run, "levels": self._session.levels}

    def _load_cache_state(self, state: dict[str, Any] | None) -> None:
        session = self._session
        if state is not None and session is not None and session.cache is None:
            session.run, session.levels = str(state["run"]), [int(count) for count in state["levels"]]


def _nobody_hears(line: str) -> None:
    pass
