"""A loss with a state, which is in no entry of the layer list, goes where the model ends and into checkpoints."""

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.elastic.training import MODELS, Case, data_of, engine_of, grouped_adamw
from tests.pipeline.models import VOCABULARY, Plain, gpt
from tests.pipeline.training import Trace, difference, train_module
from tests.spawn import launched

LOSS = Case("texts", "adamw", 2, (), ((1, 1), (4, 2)), steps=6)
LOSSES = {"fp32": (LOSS, 1e-5), "bf16 ZeRO-1": (replace(LOSS, precision="bf16 ZeRO-1"), 1e-2)}  # and tolerances
SAVED = 3  # on two replicas


class Scaled(nn.Module):
    """Cross entropy of trained multiples of the logits, and less of it with every call in training."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.8 * first, 1.2 * first, VOCABULARY))
        self.all = nn.Parameter(torch.ones(()))
        self.register_buffer("factor", torch.full((), first))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        factor = self.factor.clone()
        if self.training:
            self.factor.mul_(0.97)
        return factor * F.cross_entropy((logits.float() * self.scale * self.all).flatten(0, 1), targets.flatten())


def trained(engine: Any, case: Case, first: int, stop: int) -> list[float]:
    """Losses of some steps, whose micro-batches the replicas of the start share."""
    replicas = engine.start_shape.replicas
    share = case.batch // case.size // replicas
    at = torch.distributed.get_rank() % replicas * share
    return [float(engine.train_batch(iter(data_of(case)[step][at:][:share]))) for step in range(first, stop)]


def with_loss(case: Case, rank: int, folder: str) -> dict[str, Any]:
    """The copy of the first stage, which nothing uses there, has other values than that of the last one."""
    found: dict[str, Any] = {"losses": []}
    for begin, end, first in ((0, SAVED, 3.0 if rank == 0 else 1.0), (SAVED, case.steps, 3.0)):
        with mock.patch.dict(MODELS, {"scaled": (gpt, Scaled(first), MODELS["texts"][2])}):
            engine = engine_of(replace(case, model="scaled"))
        if begin:
            engine.load_checkpoint(folder)
        found["losses"] += trained(engine, case, begin, end)
        engine.save_checkpoint(folder)
        ends, own = engine.is_last_stage(), dict(engine.module.loss_fn.named_parameters())
        found["loss"] = {n: p.detach().clone() for n, p in own.items() if ends}
        found["trains"] = {p.requires_grad for p in own.values()} == {ends}
        engine.destroy()
    return found


def alone(case: Case) -> Trace:
    """One process. A replica's loss goes on from that of the last stage and counts its own calls, as in data parallel runs."""
    model = nn.ModuleDict({"layers": Plain(gpt()), "loss": Scaled()})
    of_replicas: list[Any] = [model["loss"]]

    def begin(number: int) -> None:
        if len(of_replicas) != (replicas := 2 // case.stages_at(number)):
            of_replicas[1:] = [copy.deepcopy(model["loss"]) for _ in range(replicas - 1)]
            for other in of_replicas[1:]:
                other.scale, other.all = model["loss"].scale, model["loss"].all

    def part_of_loss(inputs: Any, targets: Tensor, step: Any) -> Tensor:
        number = next(n for n, micro_batch in enumerate(step) if micro_batch[1] is targets)
        return of_replicas[number * len(of_replicas) // len(step)](model["layers"](inputs), targets) / len(step)

    optimizer = grouped_adamw([*model["loss"].parameters(), *model["layers"].parameters()])
    return train_module(model, optimizer, data_of(case), part_of_loss, case.clip, begin)


def worker(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    return {name: with_loss(case, rank, f"{folder}/{name}") for name, (case, _) in LOSSES.items()}


ranks = launched(worker, 2, timeout=250, folder=True)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_a_module_goes_where_the_model_ends_and_into_checkpoints(ranks: Any, name: str) -> None:
    (case, limit), found = LOSSES[name], [rank[name] for rank in ranks]
    trace = alone(case)
    for each in found:
        assert each["trains"] and each["losses"] == pytest.approx(trace.losses, rel=limit)
    assert found[0]["loss"] == {} and found[1]["loss"].keys() == {"scale", "all"}
    assert all(difference(weight, trace.weights[f"loss.{key}"]) <= 10 * limit for key, weight in found[1]["loss"].items())
