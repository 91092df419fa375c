"""FusedLamb among torch's optimizers: what torch's own generic tests ask of all of them, driven as they drive them.

After ``TestOptimRenewed`` in PyTorch's test/test_optim.py and ``torch.testing._internal.common_optimizers``, in whose form an
optimizer is described. It is not imported: it freezes flags of the process that imports it.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ds_terapipe import FusedLamb

KWARGS: dict[str, dict[str, Any]] = {
    "default": {},
    "non-default lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.01)},
    "weight decay": {"weight_decay": 0.9},
    "exclude": {"exclude": "bias_norm"},
    "apex": {"mode": "apex", "weight_decay": 0.0},
    "deepspeed": {"mode": "deepspeed"},
    "clipping": {"max_grad_norm": 0.5},
    "no search": {"check_gradients": False},
}


class OptimizerInput(NamedTuple):
    """Arguments of an optimizer."""

    kwargs: dict[str, Any]
    desc: str


class OptimizerInfo(NamedTuple):
    """An optimizer, its inputs, and schedulers that it is to run with."""

    optim_cls: Callable[..., torch.optim.Optimizer]
    inputs: list[OptimizerInput]
    scheduler_inputs: list[list[Callable[[torch.optim.Optimizer], Any]]]


INFO = OptimizerInfo(
    FusedLamb,
    [OptimizerInput(given, name) for name, given in KWARGS.items()],
    [[lambda opt: StepLR(opt, gamma=0.9, step_size=10), lambda opt: ReduceLROnPlateau(opt)]],
)
each_input = pytest.mark.parametrize("given", INFO.inputs, ids=lambda one: one.desc)


def model(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3, bias=bias))


def closure_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    inputs = torch.linspace(-1, 1, 20).view(4, 5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        return loss

    return closure


def trained(given: OptimizerInput, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = INFO.optim_cls(net.parameters(), **copy.deepcopy(given.kwargs))
    for _ in range(steps):
        optimizer.step(closure_of(net, optimizer))
    return net, optimizer


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def goes_on(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    for _ in range(2):
        optimizer.step(closure_of(net, optimizer))
    return [parameter.detach().clone() for parameter in net.parameters()]


@each_input
@pytest.mark.parametrize("schedule", [None, *INFO.scheduler_inputs])
def test_the_loss_goes_down(given: OptimizerInput, schedule: Any) -> None:
    net = model()
    optimizer = INFO.optim_cls(net.parameters(), **copy.deepcopy(given.kwargs))
    schedulers = [make(optimizer) for make in schedule or ()]
    closure = closure_of(net, optimizer)
    before = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        assert isinstance(loss, Tensor)
        for scheduler in schedulers:
            scheduler.step(loss) if not isinstance(scheduler, StepLR) else scheduler.step()
    assert closure().item() < before


@each_input
def test_a_state_dict_goes_in_and_out(given: OptimizerInput) -> None:
    net, optimizer = trained(given)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    expected = goes_on(net, optimizer)
    other = model()
    other.load_state_dict(weights)
    again = INFO.optim_cls(other.parameters(), lr=0.5)
    again.load_state_dict(state)
    assert same(again.state_dict(), state)
    assert same(goes_on(other, again), expected)


@each_input
def test_a_file_of_weights_only_holds_it(given: OptimizerInput) -> None:
    _, optimizer = trained(given)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), optimizer.state_dict())


@each_input
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_alone(given: OptimizerInput, how: str) -> None:
    net, optimizer = trained(given)
    net_too, copied = (
        pickle.loads(pickle.dumps((net, optimizer))) if how == "pickle" else copy.deepcopy((net, optimizer))
    )
    expected = goes_on(net, optimizer)
    assert same(goes_on(net_too, copied), expected)
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in net_too.parameters()}
    assert "FusedLamb" in repr(copied) and "lr: " in repr(copied)


@each_input
def test_without_gradients_a_step_does_nothing(given: OptimizerInput) -> None:
    net = model()
    optimizer = INFO.optim_cls(net.parameters(), **copy.deepcopy(given.kwargs))
    before = copy.deepcopy(net.state_dict())
    optimizer.step()
    assert same(net.state_dict(), before) and not any(optimizer.state.values())


def test_groups_have_their_own_settings() -> None:
    net = model()
    weights, biases = ([p for n, p in net.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    optimizer = INFO.optim_cls([{"params": weights, "lr": 0.0}, {"params": biases, "weight_decay": 0.0}], lr=1e-2)
    before = [[p.detach().clone() for p in group] for group in (weights, biases)]
    optimizer.step(closure_of(net, optimizer))
    assert same([p.detach() for p in weights], before[0])
    assert not any(torch.equal(p, old) for p, old in zip(biases, before[1], strict=True))


def test_parameters_may_come_with_names() -> None:
    net = model()
    optimizer = INFO.optim_cls(net.named_parameters(), lr=1e-2)
    optimizer.step(closure_of(net, optimizer))
    state = optimizer.state_dict()
    assert state["param_groups"][0]["param_names"] == [name for name, _ in net.named_parameters()]
    again = INFO.optim_cls(model().named_parameters(), lr=1e-2)
    again.load_state_dict(state)
    assert again.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in net.named_parameters()]


def test_hooks_of_steps_and_state_dicts_run() -> None:
    net, optimizer = trained(INFO.inputs[0], steps=1)
    order: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    handles = [
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
        optimizer.register_state_dict_pre_hook(hook("save pre")),
        optimizer.register_state_dict_post_hook(hook("save post")),
        optimizer.register_load_state_dict_pre_hook(hook("load pre")),
        optimizer.register_load_state_dict_post_hook(hook("load post")),
        register_optimizer_step_pre_hook(hook("every pre")),
        register_optimizer_step_post_hook(hook("every post")),
    ]
    optimizer.step(closure_of(net, optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    for handle in handles:
        handle.remove()
    assert sorted(order[:2]) == ["every pre", "pre"] and sorted(order[2:4]) == ["every post", "post"]
    assert order[4:] == ["save pre", "save post", "load pre", "load post"]
    optimizer.step()
    assert len(order) == 8


def test_a_number_for_step_is_taken() -> None:
    net, optimizer = trained(INFO.inputs[0])
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one["step"] = float(one["step"])
    optimizer.load_state_dict(state)
    expected = [float(value["step"]) + 1 for value in optimizer.state.values()]
    optimizer.step(closure_of(net, optimizer))
    assert [float(value["step"]) for value in optimizer.state.values()] == expected


def test_every_public_attribute_is_copied() -> None:
    _, optimizer = trained(INFO.inputs[0])
    names = {name for name in vars(optimizer) if not name.startswith("_")}
    assert names == {name for name in vars(copy.deepcopy(optimizer)) if not name.startswith("_")}


@pytest.mark.parametrize(
    "flag", ["foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad", "decoupled_weight_decay"]
)
def test_flags_that_it_has_not_are_refused_by_name(flag: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{flag}'"):
        INFO.optim_cls(model().parameters(), **{flag: True})


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

    accelerator, net = Accelerator(cpu=True), model()
    plain = copy.deepcopy(net)
    optimizer, other = FusedLamb(net.parameters(), lr=1e-2), FusedLamb(plain.parameters(), lr=1e-2)
    net, prepared = accelerator.prepare(net, optimizer)
    inputs = torch.linspace(-1, 1, 20).view(4, 5)
    for _ in range(3):
        accelerator.backward(net(inputs).square().mean())
        prepared.step()
        prepared.zero_grad()
        other.step(closure_of(plain, other))
    assert same([p.detach() for p in net.parameters()], [p.detach() for p in plain.parameters()])
