"""Peak of the memory that operators take, counted by their results' storages: an allocator without memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_terapipe.pipeline.recording.accounting import Peak
from ds_terapipe.pipeline.storages import storage_id


class CountedPeak(TorchDispatchMode, Peak):
    """`Peak` of everything that operators allocate while the mode is on, real or fake."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Peak.__init__(self)
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._there = 0

    def restart(self) -> int:
        self._live, self._there = {}, 0
        return 0

    def highest(self) -> int:
        return self._there

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage_id(tensor) not in given:
                self._allocated(tensor)
        self.look()
        return result

    def _allocated(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, live = storage_id(tensor), self._live
        if key in live:
            return

        def freed(_: Any) -> None:
            if self._live is live and key in live:
                self._there -= live.pop(key)[1]

        live[key] = weakref.ref(storage, freed), storage.nbytes()
        self._there += storage.nbytes()
