"""FusedLamb among torch's optimizers: what PyTorch's test/test_optim.py asks of all of them, driven as it drives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ds_terapipe import FusedLamb


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def closure_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(torch.linspace(-1, 1, 20).view(4, 5)).square().mean()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"lr": torch.tensor(0.01)}, {"lr": 0.01, "weight_decay": 0.9}, {"exclude": "bias_norm"},
     {"mode": "apex", "weight_decay": 0.0}, {"mode": "deepspeed"}, {"max_grad_norm": 0.5}, {"check_gradients": False}],
    ids=str,
)  # fmt: skip
def test_the_loss_goes_down_under_schedulers_of_torch(kwargs: dict[str, Any]) -> None:
    net = model()
    optimizer = FusedLamb(net.parameters(), **copy.deepcopy(kwargs))
    steps, plateau = StepLR(optimizer, gamma=0.9, step_size=10), ReduceLROnPlateau(optimizer)
    closure = closure_of(net, optimizer)
    before = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        assert isinstance(loss, Tensor)
        steps.step()
        plateau.step(loss.detach())
    assert closure().item() < before
    copied = copy.deepcopy(optimizer)
    assert "FusedLamb" in repr(copied) and {k for k in vars(copied) if k[0] != "_"} >= {"max_grad_norm", "param_groups"}


def test_without_gradients_a_step_does_nothing() -> None:
    net = model()
    optimizer, before = FusedLamb(net.parameters()), [parameter.detach().clone() for parameter in net.parameters()]
    optimizer.step()
    assert all(map(torch.equal, net.parameters(), before)) and not any(optimizer.state.values())


def test_parameters_may_come_with_names_and_states_with_steps_of_any_number() -> None:
    names = [name for name, _ in model().named_parameters()]
    net, other = model(), model()
    first, second = (FusedLamb(each.named_parameters()) for each in (net, other))
    for _ in range(3):
        first.step(closure_of(net, first))
    state = copy.deepcopy(first.state_dict())
    for one in state["state"].values():
        one["step"] = float(one["step"])
    second.load_state_dict(state)
    second.step(closure_of(other, second))
    assert state["param_groups"][0]["param_names"] == names == second.state_dict()["param_groups"][0]["param_names"]
    assert [float(value["step"]) for value in second.state.values()] == [4.0] * 4


def test_hooks_of_steps_and_state_dicts_run() -> None:
    net = model()
    optimizer = FusedLamb(net.parameters())
    order: list[str] = []
    registered = {
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
        "save pre": optimizer.register_state_dict_pre_hook,
        "save post": optimizer.register_state_dict_post_hook,
        "load pre": optimizer.register_load_state_dict_pre_hook,
        "load post": optimizer.register_load_state_dict_post_hook,
        "every pre": register_optimizer_step_pre_hook,
        "every post": register_optimizer_step_post_hook,
    }
    handles = [register(lambda *_, name=name: order.append(name)) for name, register in registered.items()]
    optimizer.step(closure_of(net, optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        handle.remove()
    assert sorted(order[:2]) == ["every pre", "pre"] and sorted(order[2:4]) == ["every post", "post"]
    assert order[4:] == ["save pre", "save post", "load pre", "load post"]
    optimizer.step()
    assert len(order) == 8
