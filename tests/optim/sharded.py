"""A small model cut up as tensor parallelism, ZeRO's flat partitions and pipeline stages cut it, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb

STEPS = 3
SHAPES = {
    "embedding": (30, 8),
    "qkv.weight": (24, 8),
    "qkv.bias": (24,),
    "projection.weight": (8, 16),
    "projection.bias": (8,),
    "norm": (8,),
}
SPLIT = {"embedding": 0, "qkv.weight": 0, "qkv.bias": 0, "projection.weight": 1}
"""The dimension that tensor parallelism cuts; the others are on every rank."""
DECAYED = ("embedding", "qkv.weight", "projection.weight")
ROWS = (3, 2, 1)
"""Rows of a head's query, key and value, of unequal length so that no two can be taken for each other."""


def full_tensors(seed: int) -> dict[str, Tensor]:
    """The whole model's parameters, or gradients."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Case:
    """How the model is cut, and what the optimizer is told.

    Attributes:
        data: ranks that flat partitions are cut over, 0 for parameters as they are.
        tensor: tensor-parallel ranks.
        stages: pipeline stages; the embedding is on the first and the last, the rest of the model on the first.
        by_group: step() once per parameter group, as ZeRO-1 does.
        clips: whether max_grad_norm is set.
        splits: whether the attention matrix is three layers.
    """

    name: str
    data: int = 0
    tensor: int = 1
    stages: int = 1
    by_group: bool = False
    clips: bool = False
    splits: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return max(1, self.data) * self.tensor * self.stages

    def optimizer_arguments(self) -> dict[str, Any]:
        clip = {"max_grad_norm": 0.5} if self.clips else {}
        return {"lr": 0.05, "split_qkv": self.splits, **clip, **self.arguments}


@dataclass
class _Address:
    numel: int
    start: int


@dataclass
class _Mapping:
    """The part of DeepSpeed's ``tensor_fragment`` that says where a parameter's elements are."""

    hp_fragment: Tensor
    hp_fragment_address: _Address
    lp_fragment_address: _Address


def cut(name: str, tensor: Tensor, case: Case, tensor_rank: int) -> Tensor:
    """This tensor-parallel rank's part."""
    if case.tensor == 1 or name not in SPLIT:
        return tensor.clone()
    return tensor.chunk(case.tensor, SPLIT[name])[tensor_rank].contiguous()


def mark(parameters: Mapping[str, Parameter], case: Case, stage: int) -> None:
    """Megatron's and DeepSpeed's attributes, and ours."""
    for name, parameter in parameters.items():
        parameter.tensor_model_parallel = case.tensor > 1 and name in SPLIT
        parameter.partition_dim = SPLIT.get(name, -1)
        parameter.ds_pipe_replicated = stage > 0 and name == "embedding"
        if name.startswith("qkv"):
            parameter.lamb_rows = ROWS


def names_on(case: Case, stage: int) -> list[str]:
    # On the last stage the tied embedding stands behind another parameter, so that the flat partitions cut it elsewhere.
    if case.stages == 1:
        return list(SHAPES)
    return (
        [name for name in SHAPES if name != "projection.weight"] if stage == 0 else ["projection.weight", "embedding"]
    )


class Rank:
    """One process's part of the model and its optimizer."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        data = max(1, case.data)
        self.stage, rest = divmod(rank, data * case.tensor)
        self.data_rank, self.tensor_rank = divmod(rest, case.tensor)
        full = full_tensors(0)
        self.parameters = {
            name: Parameter(cut(name, full[name], case, self.tensor_rank)) for name in names_on(case, self.stage)
        }
        mark(self.parameters, case, self.stage)
        self.groups = [[n for n in self.parameters if n in DECAYED], [n for n in self.parameters if n not in DECAYED]]
        self.groups = [group for group in self.groups if group]
        described = [
            {"params": [self.parameters[name] for name in group], "weight_decay": 0.1 if group[0] in DECAYED else 0.0}
            for group in self.groups
        ]
        self.optimizer = FusedLamb(described, **case.optimizer_arguments())
        self.optimizer.set_names({parameter: name for name, parameter in self.parameters.items()})
        self._set_groups()
        self.flats: list[Tensor] = []
        if case.data:
            for group in self.optimizer.param_groups:
                self._flatten(group)

    def _set_groups(self) -> None:
        case, data = self.case, max(1, self.case.data)
        ranks = torch.arange(case.ranks).reshape(case.stages, data, case.tensor)
        self.data_group = _group([ranks[s, :, t] for s in range(case.stages) for t in range(case.tensor)], self.rank)
        tensor = _group([ranks[s, d] for s in range(case.stages) for d in range(data)], self.rank)
        tied = _group([ranks[:, d, t] for d in range(data) for t in range(case.tensor)], self.rank)
        if case.stages > 1:
            self.optimizer.set_groups(tensor, dist.group.WORLD, {self.parameters["embedding"]: tied})
        else:
            self.optimizer.set_groups(tensor)

    def _flatten(self, group: dict[str, Any]) -> None:
        originals = group["params"]
        partition = self._partition([original.detach() for original in originals])
        start, size = self.data_rank * partition.numel(), partition.numel()
        offset = 0
        for original in originals:
            first, last = max(offset, start), min(offset + original.numel(), start + size)
            original._dp_group = self.data_group
            original._hp_mapping = None
            if first < last:
                address = _Address(last - first, first - start)
                fragment = partition.narrow(0, address.start, address.numel)
                original._hp_mapping = _Mapping(fragment, address, _Address(last - first, first - offset))
            offset += original.numel()
        group["params"] = [partition]
        self.flats.append(partition)

    def _partition(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's part of the tensors one after another, with a few elements of padding at the end."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        size = -(-(flat.numel() + 2) // self.case.data)
        padded = torch.zeros(size * self.case.data)
        padded[: flat.numel()] = flat
        return padded[self.data_rank * size : (self.data_rank + 1) * size].clone()

    def set_gradients(self, full: Mapping[str, Tensor]) -> None:
        local = {name: cut(name, full[name], self.case, self.tensor_rank) for name in self.parameters}
        if not self.case.data:
            for name, parameter in self.parameters.items():
                parameter.grad = local[name]
            return
        for flat, group in zip(self.flats, self.groups, strict=True):
            flat.grad = self._partition([local[name] for name in group])

    def step(self) -> None:
        if not self.case.by_group:
            self.optimizer.step()
            return
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups

    def pieces(self) -> dict[str, tuple[int, int, Tensor]]:
        """Name -> (tensor-parallel rank, first element of this rank's part of that, elements)."""
        found = {}
        for name, parameter in self.parameters.items():
            if not self.case.data:
                found[name] = self.tensor_rank, 0, parameter.detach().reshape(-1)
            elif parameter._hp_mapping is not None:
                start = parameter._hp_mapping.lp_fragment_address.start
                found[name] = self.tensor_rank, start, parameter._hp_mapping.hp_fragment.detach()
        return found

    def ratios(self) -> dict[str, float]:
        return {layer.name: layer.trust_ratio for layer in self.optimizer.statistics()}


def _group(members: Sequence[Tensor], rank: int) -> Any:
    """Every rank makes all groups, as PyTorch wants it; this rank's. None for a single process."""
    if not dist.is_initialized():
        return None
    groups = [dist.new_group(ranks.tolist()) for ranks in members]
    return next(group for ranks, group in zip(members, groups, strict=True) if rank in ranks.tolist())


def train(rank: int, world: int, cases: Sequence[Case]) -> list[tuple[dict, dict]]:
    """Pieces and ratios of this rank after :data:`STEPS` steps of each case."""
    results = []
    for case in cases:
        assert case.ranks == world
        mine = Rank(case, rank)
        for step in range(STEPS):
            mine.set_gradients(full_tensors(100 + step))
            mine.step()
        results.append((mine.pieces(), mine.ratios()))
    return results


def assembled(case: Case, pieces: Sequence[Mapping[str, tuple[int, int, Tensor]]], stage: int = 0) -> dict[str, Tensor]:
    """The whole parameters of a stage from its ranks' pieces."""
    size = len(pieces) // case.stages
    result = {}
    for name in names_on(case, stage):
        parts = []
        for tensor_rank in range(case.tensor):
            local = torch.full_like(cut(name, torch.empty(SHAPES[name]), case, tensor_rank), torch.nan)
            for piece in pieces[stage * size : (stage + 1) * size]:
                if name in piece and piece[name][0] == tensor_rank:
                    _, start, values = piece[name]
                    local.view(-1)[start : start + values.numel()] = values
            parts.append(local)
        result[name] = torch.cat(parts, SPLIT[name]) if case.tensor > 1 and name in SPLIT else parts[0]
    return result


def unsharded(case: Case) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The same training in this process, on whole parameters."""
    whole = Case("whole", clips=case.clips, splits=case.splits, arguments=case.arguments)
    parameters = {name: Parameter(tensor) for name, tensor in full_tensors(0).items()}
    mark(parameters, whole, 0)
    groups = [
        {"params": [p for n, p in parameters.items() if (n in DECAYED) == decayed], "weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    optimizer = FusedLamb(groups, **whole.optimizer_arguments())
    optimizer.set_names({parameter: name for name, parameter in parameters.items()})
    for step in range(STEPS):
        for name, gradient in full_tensors(100 + step).items():
            parameters[name].grad = gradient
        optimizer.step()
    ratios = {layer.name: layer.trust_ratio for layer in optimizer.statistics()}
    return {name: parameter.detach() for name, parameter in parameters.items()}, ratios
