"""Parameter groups of an optimizer whose parameters come and go: the same groups on all ranks, state with its parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_terapipe import FusedLamb
from ds_terapipe.elastic.moves.groups import in_order, refill, release
from ds_terapipe.names import UNUSED
from ds_terapipe.pipeline.parameter_groups import drop_unused, keep_trained, make_alike, occupy, unused
from tests.threads import Threads


def with_groups(*settings: tuple[float, float]) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr, "weight_decay": decay} for lr, decay in settings]
    return torch.optim.AdamW(groups)


def members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def ids(*groups: list[Any]) -> list[list[int]]:
    return [[id(parameter) for parameter in group] for group in groups]


def test_all_ranks_have_the_same_groups_in_one_order() -> None:
    settings = [((1.0, 0.1), (1.0, 0.0)), ((1.0, 0.0), (1.0, 0.0), (2.0, 0.1)), ((2.0, 0.1),)]
    optimizers = [with_groups(*each) for each in settings]
    before = [list(optimizer.param_groups) for optimizer in optimizers]
    Threads(3).run(lambda rank, gather: make_alike(optimizers[rank], None, gather))
    for groups, optimizer in zip(before, optimizers, strict=True):
        said = [(group["lr"], group["weight_decay"], group["betas"]) for group in optimizer.param_groups]
        assert said == [(lr, decay, (0.9, 0.999)) for lr, decay in [(1.0, 0.1), (1.0, 0.0), (1.0, 0.0), (2.0, 0.1)]]
        kept = [group for group in optimizer.param_groups if group["params"]]
        assert all(a is b for a, b in zip(groups, kept, strict=True))
    here = [[int(bool(group["params"])) for group in optimizer.param_groups] for optimizer in optimizers]
    assert here == [[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]]


def test_a_scheduler_for_other_groups_is_refused_on_every_rank() -> None:
    optimizers = [with_groups((1.0, 0.1), (1.0, 0.0)), with_groups((1.0, 0.0))]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0) for each in optimizers]
    errors = Threads(2).run(lambda rank, gather: make_alike(optimizers[rank], schedulers[rank], gather))
    (text,) = {f"{type(error).__name__}: {error}" for error in errors}
    assert text.startswith("ConfigError: optimizer: got 1 parameter groups on rank 1 and 2 on all ranks together")
    assert "\n" not in text and [len(each.param_groups) for each in optimizers] == [2, 1]


def test_groups_keep_the_modules_order_and_lose_what_only_stands_for_others() -> None:
    module, gone, other = nn.Linear(2, 2), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3))
    weight, bias = module.weight, module.bias
    given = [{"params": [gone], "lr": 5.0}, {"params": [bias, weight], "lr": 2.0}, {"params": [], "lr": 3.0}]
    optimizer = torch.optim.AdamW(given)
    groups = optimizer.param_groups
    in_order(optimizer, module, {gone: UNUSED})
    assert optimizer.param_groups is groups and [group["lr"] for group in groups] == [2.0, 3.0]
    assert members(optimizer) == ids([weight, bias], [])
    # one that is trained and not the module's stays in its group with its state
    optimizer = torch.optim.AdamW([{"params": [other, bias]}, {"params": [weight]}])
    other.grad = torch.ones(3)
    optimizer.step()
    in_order(optimizer, module, {})
    assert members(optimizer) == ids([bias, other], [weight]) and optimizer.state[other]["exp_avg"].all()


def test_frozen_parameters_leave_and_an_empty_group_gets_one_that_nothing_uses() -> None:
    module, names = nn.Linear(2, 2), {}
    module.bias.requires_grad_(False)
    gone = unused(module, torch.device("cpu"), names)
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": lr} for lr, p in enumerate((module.weight, module.bias, gone))]
    )
    keep_trained(optimizer)
    drop_unused(optimizer, names)
    occupy(optimizer, module, torch.device("cpu"), names)
    assert [group["lr"] for group in optimizer.param_groups] == [0, 1]
    first, second = ([*group["params"]] for group in optimizer.param_groups)
    assert len(first) == len(second) == 1 and first[0] is module.weight
    assert second[0].requires_grad and names[second[0]] == UNUSED and second[0].numel() == 1


KINDS = {
    "adamw": (lambda groups: torch.optim.AdamW(groups, lr=0.1), 2),
    "momentum": (lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), 1),
    "lamb": (lambda groups: FusedLamb(groups, lr=0.1), 2),
}


def stepped(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two linear layers of 6 + 3 numbers each, weights and biases in groups of their own, after a step."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    weights, biases = ([getattr(layer, name) for layer in model] for name in ("weight", "bias"))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer = KINDS[kind][0](groups)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def numbers(optimizer: torch.optim.Optimizer, *parameters: torch.Tensor) -> int:
    return sum(v.nbytes for p in parameters for v in optimizer.state[p].values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_leaves_the_optimizer_and_gives_its_moments_back(kind: str) -> None:
    model, optimizer = stepped(kind)
    groups, given_up = list(optimizer.param_groups), numbers(optimizer, *model[0].parameters())
    assert given_up >= 9 * 4 * KINDS[kind][1]
    model[0].requires_grad_(False)
    assert release(optimizer) == given_up and release(optimizer) == 0
    assert all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert members(optimizer) == ids([model[1].weight], [model[1].bias])
    assert set(optimizer.state) == set(model[1].parameters())
    before, frozen = model[1].weight.clone(), model[0].weight.clone()
    optimizer.step()  # goes on with the rest, frozen or not there
    assert not torch.equal(model[1].weight, before) and torch.equal(model[0].weight, frozen)
    model[1].requires_grad_(False)
    release(optimizer)
    optimizer.step()
    assert members(optimizer) == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_gets_other_parameters_with_their_state_and_settings(kind: str) -> None:
    model, optimizer = stepped(kind)
    state, groups, kept = optimizer.state, list(optimizer.param_groups), dict(optimizer.state[model[1].weight])
    gone = numbers(optimizer, *model[0].parameters(), model[1].bias)
    new = nn.Sequential(nn.Linear(4, 5), model[1])
    came = {name: torch.full((5, 4), 2.0) for name in kept if kept[name] is not None and name != "step"}
    came |= {"step": kept["step"]} if "step" in kept else {}
    settings = [{"lr": 0.7, "weight_decay": 0.3}, {"lr": 0.8}]
    assert refill(optimizer, new, {"0.weight": 1, "1.weight": 0}, {"0.weight": came}, settings) == gone
    assert optimizer.state is state and all(a is b for a, b in zip(groups, optimizer.param_groups, strict=True))
    assert members(optimizer) == ids([new[1].weight], [new[0].weight])
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.7, 0.3), (0.8, 0.0)]
    assert dict(state) == {new[1].weight: kept, new[0].weight: came}
    for parameter in (new[0].weight, new[1].weight):
        parameter.grad = torch.ones_like(parameter)
    before = new[0].weight.clone()
    optimizer.step()
    assert not torch.equal(new[0].weight, before)


def test_names_of_a_groups_parameters_follow_them() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    optimizer = torch.optim.SGD([{"params": list(model.named_parameters())}], lr=0.1)
    model[0].requires_grad_(False)
    release(optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "1.bias"]
    refill(optimizer, nn.Sequential(model[1]), {"0.bias": 0}, {})
    assert optimizer.param_groups[0]["param_names"] == ["0.bias"]
