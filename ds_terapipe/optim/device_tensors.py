"""Tensors that one call of ``step`` updates, by device, and the layers in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_terapipe.deepspeed_state import Fragment, fragments_in, link
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.optim import modes
from ds_terapipe.optim.op.segments import Part, rows_pattern, runs
from ds_terapipe.parameter_marks import is_torch_shard

_MEMORY = (Tensor.stride, Tensor.numel, attrgetter("device"))  # where elements are, apart from the address


def require_whole(tensor: Tensor) -> None:
    """Refuse a shard of PyTorch's. Raises ConfigError."""
    if is_torch_shard(tensor):
        got = f"FusedLamb with a {type(tensor).__name__} shard of shape {tuple(tensor.shape)}"
        rule = "a whole tensor, or one that DeepSpeed or Megatron divide (a shard's norm is not its layer's)"
        raise bad_value("optimizer.type", got, rule, "DDP, or ZeRO-1 or 2")


@dataclass
class Record:
    """A parameter group and the parameters that it was made with.

    Attributes:
        group: the dict in ``param_groups``.
        originals: the model's parameters.
        names: one per original.
    """

    group: dict[str, Any]
    originals: list[Tensor]
    names: list[str]

    def __post_init__(self) -> None:
        self.ids = list(map(id, self.originals))
        self._checked: list[Any] = []

    def check(self) -> None:
        """Check the group's settings if they are others than before, but for its lr. Raises ConfigError, naming one."""
        if self._checked != (now := modes.settings_of(self.group)):
            modes.resolve(self.group)
            self._checked = now

    def fragments(self) -> list[Fragment]:
        """Return where the original parameters are in the group's tensors.

        Raises:
            ConfigError: the boundaries of the layers within the tensors cannot be known.
        """
        tensors = self.group["params"]
        for tensor in tensors:  # FSDP2's take the places of parameters behind the optimizer's back
            require_whole(tensor)
        found = fragments_in(tensors, self.originals)
        if found is None:
            given, now = (
                ", ".join(str(tuple(tensor.shape)) for tensor in some[:3]) for some in (self.originals, tensors)
            )
            raise ConfigError(
                f"optimizer.type: got FusedLamb with a parameter group of {len(tensors)} tensors ({now}, ...) in place of the "
                f"{len(self.originals)} parameters it was made with ({given}, ...), must be those, their copies in the same "
                "order, or flat partitions that DeepSpeed has linked to them (ZeRO stage 1 or 2, bf16), use one of these or "
                "another optimizer"
            )
        return found


class Layer(NamedTuple):
    """Elements with one trust ratio: a parameter of the model, or rows of it.

    Attributes:
        parameter: the model's parameter.
        data_group: the processes that hold other runs of it; None if there are none.
        name: of the parameter, with the number of the sub-layer in brackets where it has some.
        settings: the parameter group.
        excluded: whether it has neither decay nor trust ratio.
    """

    parameter: Tensor
    data_group: Any
    name: str
    settings: Mapping[str, Any]
    excluded: bool


@dataclass
class DeviceTensors:
    """Tensors and layers on one device.

    Attributes:
        tensors: tensors to update.
        groups: for each tensor, which record of the call it belongs to.
        positions: for each tensor, its number among all tensors of the call.
        in_rows: numbers of tensors whose rows are several layers.
        layers: in an order that is the same on all processes that share them.
        parts: where they are in the tensors; nowhere, if other processes have all of a layer.
    """

    tensors: list[Tensor] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    in_rows: set[int] = field(default_factory=set)
    layers: list[Layer] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def add(self, fragment: Fragment, tensor: int, name: str, settings: Mapping[str, Any]) -> None:
        """Add the layers of a parameter, of which ``tensor`` has a fragment."""
        parameter, first = fragment.parameter, len(self.layers)
        pattern = rows_pattern(parameter, settings["split_qkv"])
        excluded = modes.is_excluded(settings, parameter.dim())
        names = [name] if pattern is None else [f"{name}[{number}]" for number in range(len(pattern))]
        self.layers += [Layer(parameter, fragment.group, each, settings, excluded) for each in names]
        if not fragment.length:
            return
        if pattern is not None:
            self.in_rows.add(tensor)
        for sub_layer, offset, length in runs(parameter.shape, pattern, fragment.start, fragment.length):
            self.parts.append(Part(tensor, fragment.offset + offset, length, first + sub_layer, excluded))


def by_device(records: Sequence[Record]) -> dict[torch.device, DeviceTensors]:
    """Sort the tensors and layers of these parameter groups by device.

    Where this rank has nothing of a layer, the layer is where its group is: the ranks that have some wait for it.

    Raises:
        ConfigError: the layers within the tensors are not known, or ``lamb_rows`` does not fit.
    """
    found: dict[torch.device, DeviceTensors] = {}
    position = 0
    for number, record in enumerate(records):
        homes: dict[int, tuple[DeviceTensors, int]] = {}
        for tensor in record.group["params"]:
            held = found.setdefault(tensor.device, DeviceTensors())
            homes[id(tensor)] = held, len(held.tensors)
            held.tensors.append(tensor)
            held.groups.append(number)
            held.positions.append(position)
            position += 1
        names = dict(zip(record.ids, record.names, strict=True))
        for fragment in record.fragments():
            held, index = homes[id(fragment.master)]
            held.add(fragment, index, names[id(fragment.parameter)], record.group)
    return found


def fingerprint(records: Sequence[Record]) -> list[Any]:
    """Return all that a table depends on and others may change: the groups' tensors, their memory, and DeepSpeed's links."""
    tensors = [list(map(id, record.group["params"])) for record in records]
    # `parameter.data = ...`, also by `model.to(memory_format=...)`, leaves the parameter what it is
    memory = [list(map(read, record.group["params"])) for record in records for read in _MEMORY]
    links = [
        list(map(link, record.originals)) for record, held in zip(records, tensors, strict=True) if held != record.ids
    ]
    switches = [(record.group["split_qkv"], record.group["exclude"]) for record in records]
    return [tensors, memory, links, switches]
