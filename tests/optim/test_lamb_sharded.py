"""A layer's trust ratio is that of the whole layer, however tensor parallelism, ZeRO and the pipeline cut it.

A small model is cut up as they cut it, without an engine: flat partitions, row and column parts, a tied embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb
from tests.spawn import launched

TOLERANCE = 1e-6
"""The parameters are of the size 0.1 and move by 0.005 a step; the sums of norms may round in another order."""
SHAPES = {
    "embedding": (30, 8), "qkv.weight": (24, 8), "qkv.bias": (24,), "projection.weight": (8, 16), "projection.bias": (8,),
    "norm": (8,),
}  # fmt: skip
SPLIT = {"embedding": 0, "qkv.weight": 0, "qkv.bias": 0, "projection.weight": 1}
"""The dimension that tensor parallelism cuts; the others are on every rank."""
DECAYED = ("embedding", "qkv.weight", "projection.weight")


class Case(NamedTuple):
    """How the model is cut.

    Attributes:
        data: ranks that flat partitions are cut over, 0 for parameters as they are.
        stages: the embedding is on the first and the last, the rest of the model on the first.
        by_group: step() once per parameter group, as ZeRO-1 does.
        arguments: of the optimizer.
    """

    data: int = 0
    tensor: int = 1
    stages: int = 1
    by_group: bool = False
    arguments: dict[str, Any] = {}


CLIP, QKV = {"max_grad_norm": 0.5}, {"split_qkv": True}
CASES: dict[int, dict[str, Case]] = {
    1: {"flat": Case(1), "flat, a group at a time": Case(1, by_group=True), "flat, split": Case(1, arguments=QKV)},
    2: {
        "flat": Case(2), "flat, a group at a time": Case(2, by_group=True), "flat, clipped": Case(2, arguments=CLIP),
        "flat, split": Case(2, arguments=QKV), "flat, excluded": Case(2, arguments={"exclude": "bias_norm"}),
        "flat, deepspeed": Case(2, arguments={"mode": "deepspeed"}),
        "flat, plain": Case(2, arguments={"backend": "plain"}),
        "tensor": Case(tensor=2), "tensor, clipped": Case(tensor=2, arguments=CLIP),
        "tensor, split": Case(tensor=2, arguments=QKV),
        "tensor, weight norms held": Case(tensor=2, arguments={"weight_norm_clip": (0.3, 0.9)}),
        "tied": Case(stages=2), "tied, clipped": Case(stages=2, arguments=CLIP),
    },
    3: {"flat, clipped": Case(3, arguments=CLIP), "flat, groups, split": Case(3, by_group=True, arguments=QKV)},
    4: {
        "tensor, flat, clipped": Case(2, 2, arguments=CLIP), "tied, flat, clipped": Case(2, stages=2, arguments=CLIP),
        "tensor, flat, groups, split": Case(2, 2, by_group=True, arguments=QKV),
        "tied, tensor, clipped": Case(tensor=2, stages=2, arguments=CLIP),
    },
}  # fmt: skip


def full_tensors(seed: int) -> dict[str, Tensor]:
    """The whole model's parameters, or gradients."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}


def names_on(stages: int, stage: int) -> list[str]:
    """On the last stage the tied embedding stands behind another parameter: flat partitions cut it elsewhere."""
    if stages > 1 and stage:
        return ["projection.weight", "embedding"]
    return [name for name in SHAPES if stages == 1 or name != "projection.weight"]


class Rank:
    """One process's part of the model and its optimizer; of ``Case()`` the whole."""

    def __init__(self, case: Case, rank: int = 0) -> None:
        self.case, data = case, max(1, case.data)
        self.stage, rest = divmod(rank, data * case.tensor)
        self.data_rank, self.tensor_rank = divmod(rest, case.tensor)
        names, full = names_on(case.stages, self.stage), full_tensors(0)
        self.parameters: dict[str, Any] = {name: Parameter(self.cut(name, full[name]).clone()) for name in names}
        for name, parameter in self.parameters.items():
            parameter.tensor_model_parallel = case.tensor > 1 and name in SPLIT
            parameter.ds_pipe_replicated = self.stage > 0 and name == "embedding"
            if name.startswith("qkv"):
                parameter.lamb_rows = (3, 2, 1)  # no two of one length, that could be taken for each other
        groups = [[name for name in names if (name in DECAYED) == decayed] for decayed in (True, False)]
        self.groups = [group for group in groups if group]
        described = [
            {"params": [self.parameters[name] for name in group], "weight_decay": 0.1 * (group[0] in DECAYED)}
            for group in self.groups
        ]
        self.optimizer = FusedLamb(described, lr=0.05, **case.arguments)
        self.optimizer.set_names({parameter: name for name, parameter in self.parameters.items()})
        ranks = torch.arange(case.stages * data * case.tensor).reshape(case.stages, data, case.tensor)
        self._data_group = _group(ranks.permute(0, 2, 1).reshape(-1, data), rank)
        tensor = _group(ranks.reshape(-1, case.tensor), rank)
        tied = _group(ranks.reshape(case.stages, -1).t(), rank)
        if case.stages > 1:
            self.optimizer.set_groups(tensor, dist.group.WORLD, {self.parameters["embedding"]: tied})
        else:
            self.optimizer.set_groups(tensor)
        for group in self.optimizer.param_groups if case.data else ():
            self._flatten(group)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """A view of this tensor-parallel rank's part."""
        if self.case.tensor == 1 or name not in SPLIT:
            return tensor
        return tensor.chunk(self.case.tensor, SPLIT[name])[self.tensor_rank]

    def _flatten(self, group: dict[str, Any]) -> None:
        """Put the group into flat partitions as ZeRO does, with DeepSpeed's marks of where a parameter's elements are."""
        originals = group["params"]
        partition = self._partition([original.detach() for original in originals])
        start, size, offset = self.data_rank * partition.numel(), partition.numel(), 0
        for original in originals:
            first, last = max(offset, start), min(offset + original.numel(), start + size)
            original._dp_group, original._hp_mapping = self._data_group, None
            if first < last:
                original._hp_mapping = SimpleNamespace(
                    hp_fragment=partition[first - start : last - start],
                    hp_fragment_address=SimpleNamespace(start=first - start, numel=last - first),
                    lp_fragment_address=SimpleNamespace(start=first - offset, numel=last - first),
                )
            offset += original.numel()
        group["params"] = [partition]

    def _partition(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's part of the tensors one after another, with a few elements of padding at the end."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        size = -(-(flat.numel() + 2) // self.case.data)
        padded = torch.zeros(size * self.case.data)
        padded[: flat.numel()] = flat
        return padded[self.data_rank * size : (self.data_rank + 1) * size].clone()

    def set_gradients(self, full: dict[str, Tensor]) -> None:
        local = {name: self.cut(name, full[name]).clone() for name in self.parameters}
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            if self.case.data:
                group["params"][0].grad = self._partition([local[name] for name in names])
            else:
                for name in names:
                    self.parameters[name].grad = local[name]

    def step(self) -> None:
        groups = self.optimizer.param_groups
        for some in [[group] for group in groups] if self.case.by_group else [groups]:
            self.optimizer.param_groups = some
            self.optimizer.step()
        self.optimizer.param_groups = groups

    def trained(self) -> Rank:
        for step in range(3):
            self.set_gradients(full_tensors(100 + step))
            self.step()
        return self

    def held(self) -> dict[str, Tensor]:
        """Whole parameters, nan where others have the elements."""
        found = {name: torch.full(SHAPES[name], torch.nan) for name in self.parameters}
        for name, parameter in self.parameters.items():
            values = parameter.detach().clone()
            if self.case.data:
                values.fill_(torch.nan)
                mapping = parameter._hp_mapping
                if mapping is not None:
                    start, fragment = mapping.lp_fragment_address.start, mapping.hp_fragment.detach()
                    values.view(-1)[start : start + len(fragment)] = fragment
            self.cut(name, found[name]).copy_(values)
        return found

    def ratios(self) -> dict[str, float]:
        return {layer.name: layer.trust_ratio for layer in self.optimizer.statistics()}


def _group(members: Tensor, rank: int) -> Any:
    """Every rank makes all groups, as PyTorch wants it; this rank's. None for a single process."""
    if not dist.is_initialized():
        return None
    groups = [dist.new_group(ranks) for ranks in members.tolist()]
    return next(group for ranks, group in zip(members.tolist(), groups, strict=True) if rank in ranks)


def train(rank: int, world: int) -> dict[str, Any]:
    trained = {name: Rank(case, rank).trained() for name, case in CASES[world].items()}
    found: dict[str, Any] = {name: (one.stage, one.held(), one.ratios()) for name, one in trained.items()}
    if world == 2:
        found |= {"skipped": skipped(rank), "primed": primed(rank), "refused": refused(rank)}
    return found


two, three, four = launched(train, 2), launched(train, 3), launched(train, 4)


def check(case: Case, found: Sequence[tuple[int, dict[str, Tensor], dict[str, float]]]) -> None:
    """The ranks' pieces and ratios are those of one process with whole parameters, and the ratios the same on all."""
    one = Rank(Case(arguments=case.arguments)).trained()
    expected = one.held()
    for stage in range(case.stages):
        for layer in names_on(case.stages, stage):
            pieces = torch.stack([held[layer] for on, held, _ in found if on == stage])
            assert not pieces.isnan().all(dim=0).any(), f"no rank has all of {layer}"
            assert (pieces - expected[layer]).nan_to_num(0.0).abs().max() <= TOLERANCE, layer
    for layer, ratio in one.ratios().items():
        seen = {ratios[layer] for _, _, ratios in found if layer in ratios}
        assert len(seen) == 1 and seen.pop() == pytest.approx(ratio, rel=TOLERANCE), layer


@pytest.mark.parametrize("name", CASES[1])
def test_one_process_is_unsharded(name: str) -> None:
    check(CASES[1][name], [train(0, 1)[name]])


@pytest.mark.parametrize("name", CASES[2])
def test_two_ranks_are_unsharded(two: list[dict[str, Any]], name: str) -> None:
    check(CASES[2][name], [rank[name] for rank in two])


@pytest.mark.parametrize("name", CASES[3])
def test_three_ranks_are_unsharded(three: list[dict[str, Any]], name: str) -> None:
    check(CASES[3][name], [rank[name] for rank in three])


@pytest.mark.parametrize("name", CASES[4])
def test_four_ranks_are_unsharded(four: list[dict[str, Any]], name: str) -> None:
    check(CASES[4][name], [rank[name] for rank in four])


def skipped(rank: int) -> list[tuple[bool, int]]:
    """A gradient that is inf on the last rank alone: did anything move, and how many steps were skipped."""
    found = []
    for name in ("flat", "tensor", "tied"):
        mine = Rank(CASES[2][name], rank).trained()
        before = mine.held()
        if rank == 1:
            mine.optimizer.param_groups[0]["params"][0].grad.view(-1)[0] = torch.inf
        mine.step()
        still = all(torch.equal(before[name].nan_to_num(), held.nan_to_num()) for name, held in mine.held().items())
        found.append((still, mine.optimizer.skipped_steps))
    return found


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(two: list[dict[str, Any]]) -> None:
    assert [found["skipped"] for found in two] == [[(True, 1)] * 3] * 2


def primed(rank: int) -> list[int]:
    """Steps counted after one in which all gradients are zero, and after one in which only the second rank's are."""
    mine, steps = Rank(CASES[2]["flat"], rank), []
    mine.set_gradients({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for _ in range(2):
        mine.step()
        steps += [values["step"] for values in mine.optimizer.state_dict()["state"].values()]
        if rank == 0:
            for group in mine.optimizer.param_groups:
                group["params"][0].grad.fill_(0.1)
    return steps


def test_a_priming_step_is_one_on_all_ranks(two: list[dict[str, Any]]) -> None:
    assert [found["primed"] for found in two] == [[0, 0, 1, 1]] * 2


def refused(rank: int) -> list[str]:
    """The errors where the other parts of a layer are not known."""
    messages = []
    for name in ("tensor", "tied"):
        mine = Rank(CASES[2][name], rank)
        mine.optimizer._groups = type(mine.optimizer._groups)()
        mine.set_gradients(full_tensors(100))
        try:
            mine.step()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
        dist.barrier()
    return messages


def test_unknown_ranks_are_refused(two: list[dict[str, Any]]) -> None:
    first, last = (found["refused"] for found in two)
    assert "marked tensor_model_parallel" in first[0] and first[0] == last[0]
    assert first[1] == "" and "tied weight" in last[1]
