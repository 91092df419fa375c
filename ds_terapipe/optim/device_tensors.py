"""Tensors that one call of ``step`` updates, by device, and the original parameters in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_terapipe.optim.sharding import Fragment, fragments


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


@dataclass
class DeviceTensors:
    """Tensors and parameters on one device.

    Attributes:
        tensors: tensors to update.
        groups: for each tensor, which record of the call it belongs to.
        positions: for each tensor, its number among all tensors of the call.
        places: one per original parameter; ``tensor`` counts in ``tensors``.
        place_groups: for each place, its record.
        names: for each place, the name of the parameter.
    """

    tensors: list[Tensor]
    groups: list[int]
    positions: list[int]
    places: list[Fragment]
    place_groups: list[int]
    names: list[str]


def by_device(records: Sequence[Record]) -> dict[torch.device, DeviceTensors]:
    """Sort the tensors of these parameter groups by device."""
    found: dict[torch.device, DeviceTensors] = {}
    position = 0
    for number, record in enumerate(records):
        tensors = record.group["params"]
        local = []
        for tensor in tensors:
            held = found.setdefault(tensor.device, DeviceTensors([], [], [], [], [], []))
            local.append(len(held.tensors))
            held.tensors.append(tensor)
            held.groups.append(number)
            held.positions.append(position)
            position += 1
        names = {id(original): name for original, name in zip(record.originals, record.names, strict=True)}
        for place in fragments(record.originals, tensors):
            # Where this rank has nothing of a layer, the layer is where the group is: the ranks that have some wait for it.
            held = found[tensors[place.tensor or 0].device]
            held.places.append(place if place.tensor is None else place._replace(tensor=local[place.tensor]))
            held.place_groups.append(number)
            held.names.append(names[id(place.parameter)])
    return found


def fingerprint(records: Sequence[Record]) -> list[Any]:
    """Return all that a table depends on and others may change: the groups' tensors, and DeepSpeed's links to them."""
    tensors = [list(map(id, record.group["params"])) for record in records]
    links = [
        [_link(original) for original in record.originals]
        for record, held in zip(records, tensors, strict=True)
        if held != record.ids
    ]
    switches = [(record.group["split_qkv"], record.group["exclude"]) for record in records]
    return [tensors, links, switches]


def _link(original: Tensor) -> tuple[int, int] | None:
    """Return the original's position in DeepSpeed's flat partition: first element and number of elements."""
    mapping = getattr(original, "_hp_mapping", None)
    return None if mapping is None else (mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel)
