"""Cache of a process: opened at its first use, and told about changes of the layers."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ds_terapipe.elastic.cache.outputs import Counts, Level, OutputCache, level_of, plain_attributes, versions_of
from ds_terapipe.elastic.cache.store import Tier
from ds_terapipe.elastic.optimizer import layer_dtype
from ds_terapipe.elastic.settings import CacheSettings
from ds_terapipe.pipeline.documents import Documents
from ds_terapipe.plan.costs.memory import GIGABYTE
from ds_terapipe.schedule import Placement

logger = logging.getLogger(__name__)

_MEMORY, _DISK = 0.5, 0.8  # of what is free, where the configuration does not say how much
_NAME = "ds_terapipe"


class CacheSession:
    """The cached outputs of this rank's first stage, over all reshapes.

    Args:
        settings: the block ``elastic_pipeline.cache``.

    Attributes:
        run: name of the job, the same on all ranks and after resuming from a checkpoint; None before the first
            placement that begins with a stage of frozen layers.
        levels: numbers of layers whose outputs were kept, over the whole job.
        cache: None before the first step with such a stage.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self.run: str | None = None
        self.levels: list[int] = []
        self.cache: OutputCache | None = None
        self._settings = settings
        self._flags = ""  # facts that outputs depend on beside layers and inputs
        self._inputs: Sequence[Any] = ()  # of the next step's micro-batches, on the host
        self._known: tuple[Any, ...] = ()  # versions of the layers' tensors
        self._attributes: dict[int, Any] = {}  # plain ones of each module, after the layers last ran
        self._edited = ""  # a hash of them since a script changed one
        self._length: int | None = None  # sequence length of the present phase
        self._failed = self._closed = False

    def serves(self, engine: Any, placement: Placement) -> bool:
        """Whether the model's first stage is frozen, and its outputs are to be cached; collective."""
        serves = self._settings.enabled and placement.forward_only not in (0, len(placement.stages))
        if serves and self.run is None:
            self._arrange(engine)
        return serves

    def _arrange(self, engine: Any) -> None:
        grid, watchdog = engine.grid, engine._watchdog
        shard = f"{grid.get_slice_parallel_rank()} of {grid.model_parallel_size}"
        self._flags = f"{layer_dtype(engine)} {engine.torch_autocast_enabled()} {shard}"
        self.run = engine._consensus.decide(lambda: secrets.token_hex(8))
        self._device, self._agree = engine.device, _agreement(engine)
        # not `emit`: the last level may end behind the process group, which would be asked for the rank
        first = engine.global_rank == 0
        self._say = partial(print, "[Rank 0]", flush=True) if first else lambda line: None
        self._has_failed: Callable[[], bool] = lambda: bool(watchdog.ended)  # an error ended a step
        weakref.finalize(engine, self.close)

    # ------------------------------------------------------------------------------------------------------------- steps

    @property
    def wanted(self) -> bool:
        """Whether frozen layers of the first stage are expected to cost nothing."""
        return self._settings.enabled and (self.cache is None or self.cache.worth)

    @property
    def counts(self) -> Counts:
        """Counts of samples that this rank has read and computed since the last change of frozen layers."""
        return Counts() if self.cache is None else self.cache.counts

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context manager around reading a step; entries stay if an error in it ends the process."""
        self._failed = True
        yield
        self._failed = False

    def record_inputs(self, items: Sequence[Any]) -> None:
        """Note the inputs of the next step's micro-batches."""
        self._inputs = [item[0] for item in items if isinstance(item, (tuple, list)) and len(item)]

    def note(self, layers: Sequence[Any]) -> None:
        """Note plain attributes that a script has changed since these layers ran; what they count themselves does not matter."""
        now = _plain_attributes(layers)
        if now.keys() == self._attributes.keys() and now != self._attributes:
            self._edited, self._known = hashlib.blake2b(repr([*now.values()]).encode(), digest_size=16).hexdigest(), ()

    def begin(self, layers: Sequence[Any], documents: Mapping[int, Documents]) -> None:
        """Begin a step with these layers in the first stage, all frozen; collective over the tensor-parallel ranks.

        ``documents``: of the step's micro-batches that have several, or padding.
        """
        if self.cache is None:
            self.cache = OutputCache(
                self._tiers(), self._settings.dtype == "bf16", self._device, self._agree, self._say
            )
        known = len(layers), *versions_of(layers)  # some have no tensors
        if known != self._known and not self.cache.is_out(len(layers)):  # other layers, or their weights were modified
            self._known = known
            self.levels = [count for count in self.levels if count < len(layers)]
            earlier = self._level(layers[: self.levels[-1]]) if self.levels else None
            self.levels.append(len(layers))
            self.cache.begin(self._level(layers), earlier)
        self.cache.see(self._inputs, documents)

    def end(self, layers: Sequence[Any]) -> None:
        """End the step of these layers, after an error too."""
        self._inputs, self._attributes = (), _plain_attributes(layers)
        if self.cache is not None:
            self.cache.end()

    def follow_phase(self, engine: Any) -> None:
        """Drop the entries if the phase has another sequence length."""
        length = engine.lr_scheduler.phase.seq_length
        if self.cache is not None and length != self._length:
            self.cache.forget()
        self._length = length

    def forward_seconds(self, forward: Sequence[float], frozen: int) -> list[float]:
        """Return the forward seconds of the entries, 0 for the first ``frozen`` ones if their outputs are cached."""
        wanted = self.wanted
        return [0.0 if wanted and entry < frozen else seconds for entry, seconds in enumerate(forward)]

    # ----------------------------------------------------------------------------------------------------------- opening

    def _level(self, layers: Sequence[Any]) -> Level:
        return level_of(layers, f"{self._flags} {self._settings.dtype} {self._edited}")

    def _tiers(self) -> list[Tier]:
        """Open the folders; without a limit a tier takes a share of what is free there."""
        settings, found = self._settings, []
        places = [("/dev/shm", f"{_NAME}-{os.getuid()}", settings.memory_gb, _MEMORY)]
        if settings.disk_path is not None:  # several machines may share the folder
            places.append((settings.disk_path, f"{_NAME}-{socket.gethostname()}", settings.disk_gb, _DISK))
        for folder, name, gigabytes, share in places:
            try:
                free = shutil.disk_usage(folder).free  # an error where there is no such folder
                limit = share * free if gigabytes is None else gigabytes * GIGABYTE
                found.append(Tier(Path(folder, name), str(self.run), int(limit)))
            except OSError as error:
                logger.warning("elastic_pipeline.cache: %s can't be used (%s)", folder, error)
        return found

    # --------------------------------------------------------------------------------------------------------------- end

    def close(self, done: bool = False) -> None:
        """Close the cache; idempotent.

        Entries are deleted, except after an error that ends the process before the training is ``done``.
        """
        if self.cache is not None and not self._closed:
            self._closed = True
            # an exception propagates, or is unhandled, or its handler ends the process
            rises = not isinstance(sys.exc_info()[1], (StopIteration, type(None)))
            ended = not done and (self._failed or getattr(sys, "last_value", None) is not None)
            self.cache.close(self._has_failed() or rises or ended)

    def state(self) -> dict[str, Any] | None:
        """Return the names under which entries are found again, for a checkpoint."""
        return None if self.run is None else {"run": self.run, "levels": self.levels}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on with the entries of a checkpoint's run."""
        if state is not None and self.run is not None and self.cache is None:
            self.run, self.levels = str(state["run"]), [int(count) for count in state["levels"]]


def _plain_attributes(layers: Sequence[Any]) -> dict[int, Any]:
    return {id(module): [*attributes.items()] for module, attributes in plain_attributes(layers)}


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
