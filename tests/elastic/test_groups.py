"""Parameter groups of an optimiser: which stay, and in which order."""

from __future__ import annotations

import torch
from torch import nn

from ds_terapipe.elastic.moves.groups import in_order
from ds_terapipe.names import UNUSED


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
