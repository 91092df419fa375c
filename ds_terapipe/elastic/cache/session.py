"""Cache of a process: opened at its first use, and told about changes of the layers."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_terapipe.elastic.cache.outputs import Compute, Level, OutputCache, level_of
from ds_terapipe.elastic.cache.store import Tier
from ds_terapipe.elastic.settings import CacheSettings
from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.plan.costs.memory import GIGABYTE

logger = logging.getLogger(__name__)

_MEMORY, _DISK = 0.5, 0.8  # of what is free, where the configuration does not say how much
_NAME = "ds_terapipe"


class CacheSession:
    """The cached outputs of this rank's first stage, over all reshapes.

    Args:
        settings: the block ``elastic_pipeline.cache``.
        run: name of the job, the same on all ranks and after resuming from a checkpoint.
        device: device of the stage.
        flags: facts that outputs depend on beside layers and inputs: precision and tensor-parallel rank.
        agree: MIN all-reduce over the stage's tensor-parallel ranks.
        say: prints a line for the user; problems of this process alone are logged.
        has_failed: whether an error ended a step, after which a job goes on from its last checkpoint.

    Attributes:
        run: may be set before anything is kept.
        levels: numbers of layers whose outputs were kept, over the whole job.
        done: whether the training has ended; else entries also stay after an error that ends the process.
        failed: whether the last step failed to begin.
        pulled: inputs of the next step's micro-batches, on the host.
    """

    def __init__(
        self,
        settings: CacheSettings,
        run: str,
        device: torch.device,
        flags: str,
        agree: Callable[[int], int],
        say: Callable[[str], None],
        has_failed: Callable[[], bool],
    ) -> None:
        self.run, self.levels = run, list[int]()
        self.done = self.failed = False
        self._has_failed = has_failed
        self.pulled: Sequence[Any] = ()
        self._settings, self._device, self._agree, self._say = settings, device, agree, say
        self._flags = f"{flags} {settings.dtype}"
        self._cache: OutputCache | None = None
        self._closed = False
        self._known: tuple[Any, ...] = ()

    @property
    def active(self) -> bool:
        """Whether the running step reads and keeps outputs."""
        return self._cache is not None and self._cache.active

    @property
    def wanted(self) -> bool:
        """Whether frozen layers are expected to cost nothing."""
        return self._cache is None or self._cache.worth

    @property
    def cache(self) -> OutputCache | None:
        """The cache; None before the first step with frozen layers."""
        return self._cache

    def begin(self, layers: Sequence[Any]) -> None:
        """Begin a step with these layers in the first stage, all frozen; collective over the tensor-parallel ranks."""
        cache = self._open()
        tensors = [t for f in layers for m in modules_of(f) for t in (*m.parameters(), *m.buffers())]
        known = tuple((id(tensor), tensor._version) for tensor in tensors)
        if known != self._known:  # other layers, or their weights were modified
            self._known = known
            self._begin_level(cache, layers)
        cache.see(self.pulled)

    def _begin_level(self, cache: OutputCache, layers: Sequence[Any]) -> None:
        self.levels = [count for count in self.levels if count < len(layers)]
        earlier = self._level(layers[: self.levels[-1]]) if self.levels else None
        self.levels.append(len(layers))
        cache.begin(self._level(layers), earlier)

    def _level(self, layers: Sequence[Any]) -> Level:
        return level_of(layers, self._flags)

    def forget(self) -> None:
        """Drop all entries, since other samples come from now on."""
        if self._cache is not None:
            self._cache.forget()

    def outputs(self, number: int, inputs: Any, compute: Compute) -> Any:
        """Call `OutputCache.outputs` of the current cache."""
        assert self._cache is not None
        return self._cache.outputs(number, inputs, compute)

    def end(self) -> None:
        """End the step, after an error too."""
        self.pulled = ()
        if self._cache is not None:
            self._cache.end()

    def _open(self) -> OutputCache:
        if self._cache is None:
            tiers = [tier for tier in (self._memory(), self._disk()) if tier is not None]
            self._cache = OutputCache(tiers, self._settings.dtype == "bf16", self._device, self._agree, self._say)
        return self._cache

    def _memory(self) -> Tier | None:
        root, given = Path("/dev/shm") / f"{_NAME}-{os.getuid()}", self._settings.memory_gb
        if not root.parent.is_dir():
            logger.warning("elastic_pipeline.cache: this machine has no /dev/shm, outputs are kept in disk_path alone")
            return None
        return self._tier(root, _room(root, _MEMORY) if given is None else int(given * GIGABYTE), "/dev/shm")

    def _disk(self) -> Tier | None:
        path, given = self._settings.disk_path, self._settings.disk_gb
        if path is None:
            return None
        # several machines may share the folder
        root = Path(path) / f"{_NAME}-{socket.gethostname()}"
        return self._tier(root, _room(root, _DISK) if given is None else int(given * GIGABYTE), "disk_path")

    def _tier(self, root: Path, limit: int, key: str) -> Tier | None:
        try:
            return Tier(root, self.run, limit)
        except OSError as error:
            logger.warning("elastic_pipeline.cache: %s can't be used (%s)", key, error)
            return None

    def close(self) -> None:
        """Close the cache; idempotent."""
        if self._cache is not None and not self._closed:
            self._closed = True
            # an exception propagates, or is unhandled, or its handler ends the process
            rises = not isinstance(sys.exc_info()[1], (StopIteration, type(None)))
            ended = not self.done and (self.failed or getattr(sys, "last_value", None) is not None)
            self._cache.close(self._has_failed() or rises or ended)


def _room(path: Path, share: float) -> int:
    """Return a share of the free bytes where a folder is, or will be."""
    while not path.exists():
        path = path.parent
    return int(share * shutil.disk_usage(path).free)
