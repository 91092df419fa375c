"""FusedLamb on two ranks, without an engine: a layer's trust ratio is that of the whole layer, however it is cut.

Parts of tensor parallelism, and weights that are tied over stages; ``test_deepspeed_engines.py`` has ZeRO's flat partitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed as dist
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.optim.op import backends
from tests.optim.test_lamb_device_led import led, pick
from tests.pipeline.training import raised
from tests.spawn import launched

# The parameters are of the size 0.1 and move by 0.005 a step; the sums of norms may round in another order.
TOLERANCE = 1e-6
SHAPES = {"qkv": (24, 8), "bias": (24,), "out": (8, 16), "norm": (8,), "odd": (7,)}
CLIP, QKV = {"max_grad_norm": 0.5}, {"split_qkv": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("tensor", {"mode": "deepspeed"}), "tensor, clipped": ("tensor", CLIP), "tensor, split": ("tensor", QKV),
    "tensor, weight norms held": ("tensor", {"weight_norm_clip": (0.3, 0.9)}),
    "tied": ("tied", {}), "tied, clipped": ("tied", CLIP),
    "tied, plain": ("tied", {"backend": "plain"}), "tensor, led by a device": ("tensor", {"backend": "cuda", **CLIP}),
}  # fmt: skip


def full_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}


def part_of(how: str, rank: int, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a rank. The copy of a tied one stands behind another."""
    if how == "tensor":
        cut = {name: full[name].chunk(2, int(name == "out"))[rank] for name in ("qkv", "bias", "out")}
        return {**full, **cut}
    if how == "tied":
        return {name: full[name] for name in (("qkv", "bias", "norm"), ("out", "odd", "qkv"))[rank]}
    return dict(full)


class Rank:
    """A rank's part of the model and its optimizer; of ``how`` "alone" the whole."""

    def __init__(self, how: str, rank: int, **arguments: Any) -> None:
        self.how, self.rank, world = how, rank, dist.group.WORLD
        self.parameters: dict[str, Any] = {
            name: Parameter(tensor.clone()) for name, tensor in part_of(how, rank, full_tensors(0)).items()
        }
        for name, parameter in self.parameters.items():
            parameter.tensor_model_parallel = how == "tensor" and name in ("qkv", "bias", "out")
            parameter.ds_pipe_replicated = how == "tied" and rank == 1 and name == "qkv"
            if name in ("qkv", "bias"):
                parameter.lamb_rows = (3, 2, 1)  # no two of one length, that could be taken for each other
        self.optimizer = FusedLamb([*self.parameters.values()], lr=0.05, weight_decay=0.1, **arguments)
        self.optimizer.set_names({parameter: name for name, parameter in self.parameters.items()})
        if how in ("tensor", "tied"):
            tied = {self.parameters["qkv"]: world} if how == "tied" else None
            self.optimizer.set_groups(world if how == "tensor" else None, world, tied)

    def cut(self, full: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's part of whole tensors, as the optimizer has them."""
        return [tensor.clone() for tensor in part_of(self.how, self.rank, full).values()]

    def held(self) -> list[Tensor]:
        return [tensor.detach() for tensor in self.optimizer.param_groups[0]["params"]]

    def set_gradients(self, full: Mapping[str, Tensor]) -> None:
        for tensor, gradient in zip(self.optimizer.param_groups[0]["params"], self.cut(full), strict=True):
            tensor.grad = gradient

    def trained(self) -> Rank:
        for step in range(3):
            self.set_gradients(full_tensors(100 + step))
            self.optimizer.step()
        return self

    def ratios(self) -> dict[str, float]:
        return {layer.name: layer.trust_ratio for layer in self.optimizer.statistics()}


def trained(rank: int, how: str, arguments: dict[str, Any]) -> tuple[float, dict[str, float], dict[str, float], Any]:
    """Distance of the parameters from those of one process; ratios there and here; whether a bad gradient changes nothing."""
    alone, mine = Rank("alone", 0, **arguments).trained(), Rank(how, rank, **arguments).trained()
    wanted = mine.cut({name: parameter.detach() for name, parameter in alone.parameters.items()})
    error = max(float((a - b).abs().max()) for a, b in zip(mine.held(), wanted, strict=True))
    ratios, before = mine.ratios(), [tensor.clone() for tensor in mine.held()]
    if rank == 1:
        mine.optimizer.param_groups[0]["params"][0].grad.view(-1)[0] = torch.inf
    mine.optimizer.step()
    unchanged = all(map(torch.equal, before, mine.held())) and mine.ratios() == ratios
    return error, alone.ratios(), ratios, (unchanged, mine.optimizer.skipped_steps)


def primed(rank: int, backend: str) -> list[int]:
    """Steps counted after one in which all gradients are zero, and after one in which only the second rank's are."""
    mine, steps = Rank("tensor", rank, backend=backend), []
    mine.set_gradients({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for _ in range(2):
        mine.optimizer.step()
        steps += {values["step"] for values in mine.optimizer.state_dict()["state"].values()}
        if rank == 0:
            mine.optimizer.param_groups[0]["params"][0].grad.fill_(0.1)
    return steps


def refused(rank: int) -> list[str]:
    """The errors where the other parts of a layer are not known."""
    messages = []
    for how in ("tensor", "tied"):
        mine = Rank(how, rank)
        mine.optimizer._groups = type(mine.optimizer._groups)()
        mine.set_gradients(full_tensors(100))
        messages.append(raised(mine.optimizer.step))
        dist.barrier()
    return messages


def nothing_left(rank: int) -> list[float]:
    """Distance that two steps move parameters, all of which are frozen on the first rank: it has no op of a device."""
    mine = Rank("alone", rank, backend="cuda")
    mine.optimizer.set_groups(norm_group=dist.group.WORLD)
    if rank == 0:
        mine.optimizer.param_groups[0]["params"] = []
        mine.optimizer.parameters_changed()
    else:
        mine.set_gradients(full_tensors(100))
    before = [tensor.clone() for tensor in mine.held()]
    with mock.patch.object(backends, "pick", led if rank else pick):
        for _ in range(2):
            mine.optimizer.step()
    return [float((a - b).abs().max()) for a, b in zip(before, mine.held(), strict=True)]


def worker(rank: int, world: int) -> dict[str, Any]:
    with mock.patch.object(backends, "pick", led):
        found: dict[str, Any] = {name: trained(rank, *case) for name, case in CASES.items()}
        found["primed"] = [primed(rank, backend) for backend in ("auto", "cuda")]
    return {**found, "refused": refused(rank), "nothing left": nothing_left(rank)}


ranks = launched(worker, 2)


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_ratios_are_those_of_one_process_and_a_bad_gradient_skips_everywhere(ranks, name):
    seen: dict[str, set[float]] = {}
    for error, alone, ratios, skipped in (rank[name] for rank in ranks):
        assert error <= TOLERANCE and skipped == (True, 1)
        for layer, ratio in ratios.items():
            seen.setdefault(layer, set()).add(ratio)
            assert ratio == pytest.approx(alone[layer], rel=TOLERANCE), layer
    assert seen.keys() == alone.keys() and {len(each) for each in seen.values()} == {1}


def test_a_priming_step_is_one_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert [found["primed"] for found in ranks] == [[[0, 1]] * 2] * 2


def test_a_rank_that_has_nothing_left_asks_for_no_op_of_a_device(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["nothing left"] == [] and min(ranks[1]["nothing left"]) > 1e-3


def test_unknown_ranks_are_refused(ranks: list[dict[str, Any]]) -> None:
    first, last = (found["refused"] for found in ranks)
    assert "marked tensor_model_parallel" in first[0] and first[0] == last[0]
    assert first[1] == "" and "tied weight" in last[1]
