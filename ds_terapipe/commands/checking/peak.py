"""Peak of the memory that operators take, counted by their results' storages: an allocator without memory."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_terapipe.pipeline.storages import storage_id


class CountedPeak(TorchDispatchMode):
    """`recording.accounting.Peak` of everything that operators allocate while the mode is on, real or fake."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._there = 0
        self._most = self._beside = 0.0

    def begin(self) -> None:
        """Implement :meth:`Peak.begin`."""
        self._live, self._there, self._most, self._beside = {}, 0, 0.0, 0.0

    def mark(self, beside: float) -> None:
        """Implement :meth:`Peak.mark`."""
        self._look()
        self._beside = beside

    def taken(self) -> float:
        """Implement :meth:`Peak.taken`."""
        self._look()
        return self._most

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage_id(tensor) not in given:
                self._allocated(tensor)
        self._look()
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

    def _look(self) -> None:
        self._most = max(self._most, self._there - self._beside)
