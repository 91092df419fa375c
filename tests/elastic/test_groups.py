"""Parameter groups of an optimiser: which stay, and in which order."""

from __future__ import annotations

import torch
from torch import nn

from ds_terapipe.elastic.moves.groups import in_order
from ds_terapipe.names import UNUSED
from ds_terapipe.pipeline.parameter_groups import drop_unused, keep_trained, occupy, unused


def test_a_group_of_nothing_that_is_here_leaves_and_an_empty_one_stays() -> None:
    module, unused = nn.Linear(2, 2), nn.Parameter(torch.zeros(1))
    weight, bias = module.weight, module.bias
    optimizer = torch.optim.AdamW(
        [{"params": [unused], "lr": 5.0}, {"params": [bias, weight], "lr": 2.0}, {"params": [], "lr": 3.0}]
    )
    groups = optimizer.param_groups
    in_order(optimizer, module, {unused: UNUSED})
    assert optimizer.param_groups is groups and [group["lr"] for group in groups] == [2.0, 3.0]
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(weight), id(bias)], []]


def test_a_trained_parameter_that_is_not_the_modules_stays_in_its_group_with_its_state() -> None:
    module, other = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([{"params": [other, module.bias]}, {"params": [module.weight]}])
    other.grad = torch.ones(3)
    optimizer.step()
    in_order(optimizer, module, {})
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [
        [id(module.bias), id(other)],
        [id(module.weight)],
    ]
    assert optimizer.state[other]["exp_avg"].all()


def test_frozen_parameters_leave_and_an_empty_group_gets_one_that_nothing_uses() -> None:
    module, names = nn.Linear(2, 2), {}
    module.bias.requires_grad_(False)
    gone = unused(module, torch.device("cpu"), names)
    groups = [
        {"params": [module.weight], "lr": 1.0},
        {"params": [module.bias], "lr": 2.0},
        {"params": [gone], "lr": 3.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    keep_trained(optimizer)
    drop_unused(optimizer, names)
    occupy(optimizer, module, torch.device("cpu"), names)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]
    first, second = ([*group["params"]] for group in optimizer.param_groups)
    assert len(first) == len(second) == 1 and first[0] is module.weight
    assert second[0].requires_grad and names[second[0]] == UNUSED and second[0].numel() == 1
