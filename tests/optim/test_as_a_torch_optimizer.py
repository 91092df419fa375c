"""FusedLamb among torch's optimizers: what torch's own generic tests ask of all of them, driven as they drive them.

After ``TestOptimRenewed`` in PyTorch's test/test_optim.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ds_terapipe import FusedLamb

KWARGS: dict[str, dict[str, Any]] = {
    "default": {},
    "tensor lr": {"lr": torch.tensor(0.01)},
    "weight decay": {"lr": 0.01, "weight_decay": 0.9},
    "exclude": {"exclude": "bias_norm"},
    "apex": {"mode": "apex", "weight_decay": 0.0},
    "deepspeed": {"mode": "deepspeed"},
    "clipping": {"max_grad_norm": 0.5},
    "no search": {"check_gradients": False},
}


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def closure_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    inputs = torch.linspace(-1, 1, 20).view(4, 5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        return loss

    return closure


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    """Copies of the parameters after these steps."""
    for _ in range(steps):
        optimizer.step(closure_of(net, optimizer))
    return [parameter.detach().clone() for parameter in net.parameters()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("name", KWARGS)
def test_the_loss_goes_down_under_schedulers_of_torch(name: str) -> None:
    net = model()
    optimizer = FusedLamb(net.parameters(), **copy.deepcopy(KWARGS[name]))
    steps, plateau = StepLR(optimizer, gamma=0.9, step_size=10), ReduceLROnPlateau(optimizer)
    closure = closure_of(net, optimizer)
    before = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        assert isinstance(loss, Tensor)
        steps.step()
        plateau.step(loss)
    assert closure().item() < before


@pytest.mark.parametrize("name", KWARGS)
def test_states_go_in_and_out_and_copies_go_on_alone(name: str) -> None:
    net = model()
    optimizer = FusedLamb(net.parameters(), **copy.deepcopy(KWARGS[name]))
    trained(net, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    copies = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
    loaded = copy.deepcopy(net)
    copies.append((loaded, FusedLamb(loaded.parameters(), lr=0.5)))
    copies[2][1].load_state_dict(state)
    assert same(copies[2][1].state_dict(), state)
    copies[2][1].max_grad_norm = optimizer.max_grad_norm  # of the constructor
    expected = trained(net, optimizer)
    for net_too, copied in copies:
        assert same(trained(net_too, copied), expected)
        assert {k for k in vars(copied) if k[0] != "_"} == {k for k in vars(optimizer) if k[0] != "_"}
        assert "FusedLamb" in repr(copied) and "lr: " in repr(copied)
    assert same(trained(net, optimizer), trained(*copies[0]))


def test_without_gradients_a_step_does_nothing() -> None:
    net = model()
    optimizer, before = FusedLamb(net.parameters()), copy.deepcopy(net.state_dict())
    optimizer.step()
    assert same(net.state_dict(), before) and not any(optimizer.state.values())


def test_parameters_may_come_with_names() -> None:
    names = [name for name, _ in model().named_parameters()]
    first, second = (FusedLamb(model().named_parameters(), lr=1e-2) for _ in range(2))
    state = first.state_dict()
    second.load_state_dict(state)
    assert state["param_groups"][0]["param_names"] == names == second.state_dict()["param_groups"][0]["param_names"]


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


def test_a_number_for_step_is_taken() -> None:
    net = model()
    optimizer = FusedLamb(net.parameters())
    trained(net, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one["step"] = float(one["step"])
    optimizer.load_state_dict(state)
    trained(net, optimizer, 1)
    assert [float(value["step"]) for value in optimizer.state.values()] == [4.0] * 4


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad"])
def test_flags_that_it_has_not_are_refused_by_name(flag: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{flag}'"):
        FusedLamb(model().parameters(), **{flag: True})


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("accelerate") is None, reason="extra trainer")
def test_transformers_trainer_takes_it_as_an_instance(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=64, n_positions=32))
    optimizer = FusedLamb(net.parameters(), lr=5e-3)
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (16, 16))]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=3, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(net, arguments, train_dataset=data, optimizers=(optimizer, StepLR(optimizer, 100)))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < losses[0]
    assert all(float(state["step"]) == 12 for state in optimizer.state.values())


@pytest.mark.skipif(find_spec("accelerate") is None, reason="extra trainer")
def test_accelerate_prepares_it() -> None:
    from accelerate import Accelerator

    accelerator, net, plain = Accelerator(cpu=True), model(), model()
    optimizer, other = FusedLamb(net.parameters(), lr=1e-2), FusedLamb(plain.parameters(), lr=1e-2)
    net, prepared = accelerator.prepare(net, optimizer)
    inputs = torch.linspace(-1, 1, 20).view(4, 5)
    for _ in range(3):
        accelerator.backward(net(inputs).square().mean())
        prepared.step()
        prepared.zero_grad()
    assert same([p.detach() for p in net.parameters()], trained(plain, other))
