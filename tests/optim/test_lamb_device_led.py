"""The way of a GPU, where the op counts the steps and the host never looks, on a stand-in for its op: the same parameters."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim import modes, sharding
from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.optim.op import backends
from ds_terapipe.optim.op.plain import FOUND_INF, Plain
from ds_terapipe.optim.step_rules import DeviceSteps

from . import oracle

Side = tuple[list[Parameter], FusedLamb]
pick = backends.pick


class StandIn(Plain):
    """Counts the steps in the rules, as the op on CUDA does."""

    name = "cuda"

    def write_rules(self, rules: Tensor, values: Tensor) -> None:
        rules[:, : modes.STEP] = values[:, : modes.STEP]
        rules[:, modes.STEP + 1 :] = values[:, modes.STEP + 1 :]

    def apply(self, *arguments: Any, advance: bool = False) -> None:
        tables, _, control, _ = arguments
        super().apply(*arguments)
        if advance and control[FOUND_INF] == 0:
            tables.rules[:, modes.STEP] += 1

    def step(self, *arguments: Any, advance: bool = False) -> None:
        self.moments(*arguments[:3])
        self.apply(*arguments, advance=advance)


def led(device: torch.device, name: str) -> Any:
    """In the place of `pick`."""
    return StandIn() if name == "cuda" and device.type == "cpu" else pick(device, name)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Side]:
    """Two optimizers of the same parameters, led by the device and by the host."""
    made, clips = [], getattr(request, "param", None)
    for backend in ("cuda", "plain"):
        params = oracle.parameters()
        groups = [{"params": params[:3]}, {"params": params[3:], "mode": "deepspeed", "lr": 0.02}]
        made.append((params, FusedLamb(groups, backend=backend, max_grad_norm=clips)))
    monkeypatch.setattr(backends, "pick", led)
    return made


def step(side: Side, grads: list[Tensor], absent: tuple[int, ...] = ()) -> None:
    for i, (parameter, gradient) in enumerate(zip(side[0], grads, strict=True)):
        parameter.grad = None if i in absent else gradient
    with torch.device("meta"):  # the default device of a script may be another than that of parameters or tables
        side[1].step(grad_scale=oracle.SCALE)


def assert_same(one: Side, other: Side) -> None:
    assert all(map(torch.equal, one[0], other[0]))
    first, second = one[1].state_dict(), other[1].state_dict()
    assert first["param_groups"] == second["param_groups"] and first["state"].keys() == second["state"].keys()
    for values, theirs in zip(first["state"].values(), second["state"].values(), strict=True):
        assert values["step"] == theirs["step"] and torch.equal(values["exp_avg_sq"], theirs["exp_avg_sq"])


@pytest.mark.parametrize("sides", [None, oracle.MAX_GRAD_NORM], indirect=True)
def test_led_by_the_device_is_led_by_the_host(sides: list[Side]) -> None:
    """Priming, skipped steps, parameters without gradient, another learning rate, loading and copying."""
    grads = list(oracle.gradients(6))
    zeros, bad = [torch.zeros_like(gradient) for gradient in grads[0]], [gradient.clone() for gradient in grads[3]]
    bad[1][5] = torch.nan
    steps: list[tuple[list[Tensor], tuple[int, ...]]] = [
        (zeros, ()), (grads[0], ()), (zeros, ()), (grads[1], (0, 4)), (bad, (1,)), (bad, ()), (grads[2], (2,)),
    ]  # fmt: skip
    held = torch.tensor(0.01, dtype=torch.float64)  # a rate may live on the device
    for side, group in ((side, side[1].param_groups[0]) for side in sides):
        group["lr"] = held.fill_(0.01)
        for each in steps:
            step(side, *each)
        held.fill_(0.005)
        step(side, grads[3])
        side[1].load_state_dict(side[1].state_dict())
        step(side, grads[4])
    assert_same(*sides)
    params, optimizer = sides[0]
    assert [values["step"] for values in optimizer.state_dict()["state"].values()] == [6, 6, 6, 7, 6]
    assert all(isinstance(optimizer.state[parameter]["step"], DeviceSteps) for parameter in params)
    assert [side[1].skipped_steps for side in sides] == [1, 1]
    copies = [copy.deepcopy(side) for side in sides]
    for side in (*copies, *sides):
        step(side, grads[5])
    assert_same(*copies)
    assert_same(sides[0], copies[0])


def test_all_that_a_steady_step_asks_of_the_device(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known that a step was made, the device is not asked for the number of steps, and the rules stay in place."""
    for grads in oracle.gradients(3):
        step(sides[0], grads)
    ((_, (table,)),) = sides[0][1]._tables.values()
    assert table._rules.has_started
    monkeypatch.setattr(table._rules, "steps_made", lambda: pytest.fail("the device was asked for the number of steps"))
    rules = table._rules.values
    for grads in oracle.gradients(2):
        step(sides[0], grads)
    assert table._rules.values is rules


def test_sums_of_a_job_that_has_nccl_are_made_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may have gloo for host memory beside it, which no other rank would come to."""
    sent = torch.ones(3)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(Tensor, "cuda", lambda self: sent)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: values.mul_(7 if values is sent else -1))
    values = torch.zeros(3)
    sharding.all_reduce(values, None)
    assert values.tolist() == [7.0] * 3
