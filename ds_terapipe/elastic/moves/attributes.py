"""Plain attributes of modules and parameters that hold tensors: a fixed random matrix, a running mean of a weight.

NumPy's arrays, sets and bytes, and lists, tuples, deques and dicts of all these, are among them. Moved layers have them as
they were. Only those travel that the layer's spec builds otherwise.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque)  # torch's trees know them
_SETS = (set, frozenset, Counter)  # of plain values
_OWN = frozenset(vars(nn.Module()))  # attributes of every module


class Place(NamedTuple):
    """Place of an attribute: tensor-parallel index, name of the module, name of the attribute, maybe a parameter's."""

    tensor: int
    module: str
    attribute: str


@dataclass(frozen=True)
class OnHost:
    """A tensor's values in host memory, and the type of the device that it was on."""

    values: Tensor
    device: str


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a flag or None, or a list or tuple of these."""
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, list)) and all(map(is_plain, value)))


def checksums(module: nn.Module) -> dict[str, str]:
    """Return a hash of each attribute of a module, or its parameters, that is a tensor or holds more than plain values."""
    buffers = set(map(id, module.buffers()))  # a second name of one goes with it
    held = {key: value for key, value in vars(module).items() if key not in _OWN}
    for name, parameter in module.named_parameters(recurse=False):
        held |= {f"{name}.{key}": value for key, value in vars(parameter).items()}
    return {
        key: _checksum(value)
        for key, value in held.items()
        if not is_plain(value) and _travels(value) and id(value) not in buffers
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


def values_of(layers: Mapping[str, nn.Module], places: Iterable[Place], tensor: int) -> dict[Place, Any]:
    """Return what this rank has of these attributes, with each tensor `OnHost`."""
    modules, found = _modules(layers), {}
    for place in places:
        if place.tensor != tensor or place.module not in modules:
            continue
        holder, key = _holder(modules, place)
        if (value := vars(holder).get(key)) is not None:
            found[place] = to_host(value)
    return found


def put(layers: Mapping[str, nn.Module], values: Mapping[Place, Any], device: torch.device) -> None:
    """Set attributes of newly built layers; ``device``: of those that were on one of its type."""
    modules = _modules(layers)
    for place, value in values.items():
        setattr(*_holder(modules, place), to_device(value, device))


def to_host(value: Any) -> Any:
    """Return a value with each tensor in it `OnHost`."""
    return tree_map_only(Tensor, lambda each: OnHost(each.detach().cpu(), each.device.type), value)


def to_device(value: Any, device: torch.device) -> Any:
    """Invert `to_host`; ``device``: of the tensors that were on one of its type."""
    return tree_map_only(OnHost, lambda each: each.values.to(device if each.device == device.type else "cpu"), value)


def _holder(modules: Mapping[str, nn.Module], place: Place) -> tuple[Any, str]:
    """Return the module or parameter that has an attribute, and the attribute's name there."""
    parameter, _, key = place.attribute.rpartition(".")
    return modules[place.module].get_parameter(parameter) if parameter else modules[place.module], key


def _modules(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {prefix + name: module for prefix, layer in layers.items() for name, module in layer.named_modules()}


def _travels(value: Any) -> bool:
    kind = type(value)
    if type(value) is Tensor:
        return value.layout == torch.strided and value.device.type != "meta"
    if type(value) is np.ndarray:
        return not bool(value.dtype.hasobject)
    if kind is defaultdict and getattr(value.default_factory, "__module__", "builtins") != "builtins":
        return False  # another process may not know the function
    if kind in _SETS:
        return all(map(is_plain, value))
    return isinstance(value, (*_PLAIN, bytes, np.generic)) or (
        kind in _CONTAINERS and all(map(_travels, _entries(value)))
    )


def _entries(value: Any) -> Iterator[Any]:
    return iter(chain(*value.items()) if isinstance(value, dict) else value)


def _checksum(value: Any) -> str:
    """Return a hash of a value; equal ones may differ in it, as sets of another order, and then travel for nothing."""
    return hashlib.blake2b(pickle.dumps(tree_map_only(Tensor, _as_bytes, value)), digest_size=16).hexdigest()


def _as_bytes(tensor: Tensor) -> tuple[str, bytes]:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)}", flat.numpy().tobytes()
