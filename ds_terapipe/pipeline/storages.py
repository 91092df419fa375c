"""Bytes of the storages of tensors, each counted once."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a living tensor's storage; addresses would not do, since fake tensors have none."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of every storage by its identity."""
    return {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
