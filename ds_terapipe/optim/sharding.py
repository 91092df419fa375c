"""Process groups over which layers are divided, and the sums of their norms."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist

from ds_terapipe.errors import ConfigError
from ds_terapipe.job import Job
from ds_terapipe.optim.device_tensors import Layer
from ds_terapipe.parameter_marks import is_copy, is_counted, is_tensor_parallel

Group = Any  # torch.distributed.ProcessGroup, which builds of PyTorch without distributed lack


@dataclass
class Groups:
    """The process groups that :meth:`FusedLamb.set_groups` was given."""

    tensor_parallel: Group | None = None
    norm: Group | None = None
    tied: dict[int, Group] = field(default_factory=dict)
    """id of an original parameter -> the processes that hold a copy of it on other pipeline stages"""


def size(group: Group | None) -> int:
    return dist.get_world_size(group) if group is not None else 1


def tensor_parallel_group(groups: Groups, parameters: Sequence[Tensor]) -> Group | None:
    """The tensor-parallel ranks: as set, else those of Megatron-core if it is in use. None if there is but one.

    Raises:
        ConfigError: if a parameter is marked as tensor-parallel and the other ranks are not known.
    """
    group = groups.tensor_parallel
    state = sys.modules.get("megatron.core.parallel_state")
    if group is None and state is not None and state.model_parallel_is_initialized():
        group = state.get_tensor_model_parallel_group()
    if group is not None:
        return group if size(group) > 1 else None
    several = len(Job.current().ranks) > 1
    marked = next((p for p in parameters if is_tensor_parallel(p)), None) if several else None
    if marked is not None:
        raise ConfigError(
            f"optimizer.type: got FusedLamb and a parameter of shape {tuple(marked.shape)} marked tensor_model_parallel, must be "
            "told the tensor-parallel ranks, use FusedLamb(tensor_parallel_group=...) or set_groups(tensor_parallel_group=...)"
        )
    return None


class Sum(NamedTuple):
    """One all-reduce of norms.

    Attributes:
        group: the processes.
        rows: the layers whose norms it sums, int64.
        mine: for each of these, whether this rank's values count, bool [rows, 1].
    """

    group: Group
    rows: Tensor
    mine: Tensor


class Reduction:
    """Reduction of partial norms to those of whole layers, and of the sums by which all ranks decide.

    Args:
        layers: for each row of the norms, the parameter and the processes that hold its other runs.
        groups: the process groups.
        device: where the norms are.

    Attributes:
        counted: for each layer, whether this rank adds its gradient to the global norm.
        tensor_group: the tensor-parallel ranks; None if there is but one.

    Raises:
        ConfigError: if a layer is shared with processes that are not known.
    """

    def __init__(self, layers: Sequence[Layer], groups: Groups, device: torch.device) -> None:
        parameters = [layer.parameter for layer in layers]
        self.tensor_group = tensor_parallel_group(groups, parameters)
        self._norm_group = groups.norm
        tensor_rank = 0 if self.tensor_group is None else dist.get_rank(self.tensor_group)
        self.counted = [is_counted(parameter, tensor_rank) for parameter in parameters]
        data = _by_group([layer.data_group for layer in layers])
        self._data_groups = [group for group, _ in data]
        everywhere = [True] * len(layers)
        # A replicated layer's norms come from the first rank too: ranks that round differently would drift apart.
        here = [tensor_rank == 0 or is_tensor_parallel(parameter) for parameter in parameters]
        owned = [not is_copy(parameter) for parameter in parameters]
        self._sums = [
            *(_sum(group, rows, everywhere, device) for group, rows in data),
            *(_sum(group, rows, here, device) for group, rows in _by_group([self.tensor_group] * len(layers))),
            *(_sum(group, rows, owned, device) for group, rows in _by_group(_tied_groups(parameters, groups.tied))),
        ]

    @property
    def is_local(self) -> bool:
        """Whether every layer is whole here."""
        return not self._sums

    def sum_norms(self, norms: Tensor) -> None:
        """Put the sums of squares of whole layers, float64 [L, 2], in the place of those of this rank's parts. Collective."""
        for group, rows, mine in self._sums:
            part = torch.where(mine, norms[rows], 0.0)
            all_reduce(part, group)
            norms[rows] = part

    def control_groups(self, clips: bool) -> list[Group]:
        """The groups over which, one after another, each gradient is counted once.

        Raises:
            ConfigError: if they are not known.
        """
        if self._norm_group is not None:
            return [self._norm_group] if size(self._norm_group) > 1 else []
        if clips and len(self._data_groups) > 1:
            raise ConfigError(
                "optimizer.params.max_grad_norm: got parameters that are sharded over different processes, must be told which "
                "ranks together hold each parameter once, use set_groups(norm_group=...)"
            )
        return [*self._data_groups, *([self.tensor_group] if self.tensor_group is not None else [])]


def _by_group(groups: Sequence[Group | None]) -> list[tuple[Group, list[int]]]:
    """Return the groups of several processes, and the rows of each."""
    found: dict[int, tuple[Group, list[int]]] = {}
    for row, group in enumerate(groups):
        if size(group) > 1:
            found.setdefault(id(group), (group, []))[1].append(row)
    return list(found.values())


def _sum(group: Group, rows: list[int], mine: Sequence[bool], device: torch.device) -> Sum:
    counted = torch.tensor([[mine[row]] for row in rows], device=device)
    return Sum(group, torch.tensor(rows, device=device), counted)


def _tied_groups(parameters: Sequence[Tensor], tied: Mapping[int, Group]) -> list[Group | None]:
    """Return the processes that hold each parameter on other pipeline stages. Raises ConfigError if they are not known."""
    for parameter in parameters:
        if is_copy(parameter) and tied.get(id(parameter)) is None:
            raise ConfigError(
                f"optimizer.type: got FusedLamb and a tied weight of shape {tuple(parameter.shape)} that belongs to another "
                "pipeline stage, must be told that stage, use FusedLamb.set_groups(tied={parameter: group})"
            )
    return [tied.get(id(parameter)) for parameter in parameters]


def all_reduce(values: Tensor, group: Group) -> None:
    """Sum ``values`` over the group in place, on devices where it has NCCL, as others' values are. Collective."""
    if values.device.type == "cpu" and "nccl" in dist.get_backend_config(group):
        sent = values.cuda()
        dist.all_reduce(sent, group=group)
        values.copy_(sent)
        return
    dist.all_reduce(values, group=group)
