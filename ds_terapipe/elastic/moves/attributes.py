"""Tensors that are plain attributes of modules, neither parameters nor buffers: a fixed random matrix, a running mean.

Moved layers have them as they were. Only those travel that the layer's spec builds otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """Place of an attribute: tensor-parallel index, name of the module, name of the attribute."""

    tensor: int
    module: str
    attribute: str


def checksums(module: nn.Module) -> dict[str, str]:
    """Return a hash of each tensor among a module's plain attributes."""
    buffers = set(map(id, module.buffers()))  # a second name of one goes with it
    return {
        key: _checksum(value) for key, value in vars(module).items() if _travels(value) and id(value) not in buffers
    }


def differing(layers: Mapping[str, nn.Module], live: Mapping[str, Mapping[str, str]], tensor: int) -> list[Place]:
    """Return the attributes that newly built layers lack, or have otherwise.

    Args:
        layers: built layers by the prefix of their names.
        live: `checksums` of the live modules, by name.
        tensor: tensor-parallel index of this rank.
    """
    found = []
    for prefix, layer in layers.items():
        for name, module in layer.named_modules():
            here = checksums(module)
            wanted = live.get(prefix + name, {}).items()
            found += [Place(tensor, prefix + name, key) for key, checksum in wanted if here.get(key) != checksum]
    return found


def values_of(layers: Mapping[str, nn.Module], places: Iterable[Place], tensor: int) -> dict[Place, tuple[Tensor, str]]:
    """Return what this rank has of these attributes, in host memory, and the type of its device."""
    modules, found = _modules(layers), {}
    for place in places:
        value = vars(modules[place.module]).get(place.attribute) if place.module in modules else None
        if place.tensor == tensor and value is not None:
            found[place] = value.detach().cpu(), value.device.type
    return found


def put(layers: Mapping[str, nn.Module], values: Mapping[Place, tuple[Tensor, str]], device: torch.device) -> None:
    """Set attributes of newly built layers; ``device``: of those that were on one of its type."""
    modules = _modules(layers)
    for place, (value, kind) in values.items():
        setattr(modules[place.module], place.attribute, value.to(device if kind == device.type else "cpu"))


def _modules(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {prefix + name: module for prefix, layer in layers.items() for name, module in layer.named_modules()}


def _travels(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and value.device.type != "meta"


def _checksum(tensor: Tensor) -> str:
    values: Any = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    found.update(values)
    return found.hexdigest()
