"""The way of a GPU, where the op counts the steps and the host never looks, on a stand-in for its op: the same parameters."""

from __future__ import annotations

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
from ds_terapipe.optim.op.segments import Tables
from ds_terapipe.optim.step_rules import DeviceSteps
from tests.spawn import launched

from . import oracle


class StandIn(Plain):
    """Counts the steps in the rules, as the op on CUDA does."""

    name = "cuda"

    def write_rules(self, rules: Tensor, values: Tensor) -> None:
        rules[:, : modes.STEP] = values[:, : modes.STEP]
        rules[:, modes.STEP + 1 :] = values[:, modes.STEP + 1 :]

    def apply(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor, *, advance: bool = False) -> None:
        super().apply(tables, norms, control, ratios)
        if advance and control[FOUND_INF] == 0:
            tables.rules[:, modes.STEP] += 1

    def step(self, tables: Tables, norms: Tensor, control: Tensor, ratios: Tensor, *, advance: bool = False) -> None:
        self.moments(tables, norms, control)
        self.apply(tables, norms, control, ratios, advance=advance)


def groups(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3]}, {"params": params[3:], "mode": "deepspeed", "lr": 0.02}]


def pair(
    monkeypatch: pytest.MonkeyPatch, **arguments: Any
) -> tuple[list[Parameter], FusedLamb, list[Parameter], FusedLamb]:
    """Two optimizers of the same parameters, led by the device and by the host."""
    device, host = oracle.parameters(), oracle.parameters()
    first, second = FusedLamb(groups(device), **arguments), FusedLamb(groups(host), backend="plain", **arguments)
    plain = backends.pick
    monkeypatch.setattr(backends, "pick", lambda d, name: StandIn() if name == "auto" else plain(d, name))
    return device, first, host, second


def step(params: list[Parameter], optimizer: FusedLamb, grads: list[Tensor], absent: tuple[int, ...] = ()) -> None:
    for i, (parameter, gradient) in enumerate(zip(params, grads, strict=True)):
        parameter.grad = None if i in absent else gradient
    optimizer.step(grad_scale=oracle.SCALE)


def assert_same(one: tuple[list[Parameter], FusedLamb], other: tuple[list[Parameter], FusedLamb]) -> None:
    assert all(map(torch.equal, one[0], other[0]))
    first, second = one[1].state_dict(), other[1].state_dict()
    assert first["param_groups"] == second["param_groups"] and first["state"].keys() == second["state"].keys()
    for values, theirs in zip(first["state"].values(), second["state"].values(), strict=True):
        assert values["step"] == theirs["step"] and torch.equal(values["exp_avg_sq"], theirs["exp_avg_sq"])


@pytest.mark.parametrize("clips", [None, oracle.MAX_GRAD_NORM])
def test_led_by_the_device_is_led_by_the_host(clips: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Priming, skipped steps, parameters without gradient, another learning rate, loading and copying."""
    device, first, host, second = pair(monkeypatch, max_grad_norm=clips)
    sides = [(device, first), (host, second)]
    grads = list(oracle.gradients(10))
    bad = [gradient.clone() for gradient in grads[3]]
    bad[1][5] = torch.nan
    for params, optimizer in sides:
        step(params, optimizer, [torch.zeros_like(gradient) for gradient in grads[0]])
        step(params, optimizer, grads[0])
        step(params, optimizer, [torch.zeros_like(gradient) for gradient in grads[0]])
        step(params, optimizer, grads[1], absent=(0, 4))
        step(params, optimizer, bad, absent=(1,))
        step(params, optimizer, bad)
        step(params, optimizer, grads[2], absent=(2,))
        optimizer.param_groups[0]["lr"] = 0.005
        step(params, optimizer, grads[3])
        optimizer.load_state_dict(optimizer.state_dict())
        step(params, optimizer, grads[4])
    assert_same(*sides)
    assert [values["step"] for values in first.state_dict()["state"].values()] == [6, 6, 6, 7, 6]
    assert all(isinstance(first.state[parameter]["step"], DeviceSteps) for parameter in device)
    assert first.skipped_steps == second.skipped_steps == 1
    copies = [copy.deepcopy(side) for side in sides]
    for params, optimizer in copies:
        step(params, optimizer, grads[5])
    assert_same(*copies)
    for params, optimizer in sides:
        step(params, optimizer, grads[5])
    assert_same(sides[0], copies[0])


def test_all_that_a_steady_step_asks_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known that a step was made, no more tensor is made or computed than the op's own and two copies."""
    params, optimizer, _, _ = pair(monkeypatch)
    for grads in oracle.gradients(3):
        step(params, optimizer, grads)
    ((_, (table,)),) = optimizer._tables.values()
    assert table._rules.has_started
    monkeypatch.setattr(table._rules, "steps_made", lambda: pytest.fail("the device was asked for the number of steps"))
    for grads in oracle.gradients(2):
        step(params, optimizer, grads)


def test_the_learning_rate_may_live_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, first, host, second = pair(monkeypatch)
    held = torch.tensor(0.01, dtype=torch.float64)
    first.param_groups[0]["lr"] = held
    for grads, lr in zip(oracle.gradients(3), (0.01, 0.03, 0.002), strict=True):
        held.fill_(lr)
        second.param_groups[0]["lr"] = lr
        step(device, first, grads)
        step(host, second, grads)
    for a, b in zip(device, host, strict=True):
        assert torch.equal(a, b)


# --------------------------------------------------------------------------------------------------------- several ranks

PRIMING, REAL, BAD = 0.0, 1.0, float("nan")
LED = {"host": (False, False), "device": (True, True), "first by the device": (True, False)}


def sharded(rank: int, led: tuple[bool, bool]) -> tuple[list[float], list[tuple[float, ...]]]:
    """A matrix in two parts: steps of zeros (as DeepSpeed's wrappers begin), of numbers and of nan; its values and statistics."""
    plain, group = backends.pick, torch.distributed.group.WORLD
    parameter = Parameter(torch.arange(1.0, 5.0) * (rank + 1))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    optimizer = FusedLamb([parameter], lr=0.1)
    optimizer.set_groups(tensor_parallel_group=group, norm_group=group)
    found = []
    backends.pick = lambda device, name: StandIn() if led[rank] else plain(device, "plain")
    for value in (PRIMING, REAL, REAL, BAD, BAD, REAL, BAD):
        parameter.grad = torch.full((4,), value) * torch.arange(1.0, 5.0)
        optimizer.step()
        (layer,) = optimizer.statistics()
        found.append((layer.weight_norm, layer.update_norm, layer.trust_ratio))
    backends.pick = plain
    return parameter.tolist(), found


def nothing_left(rank: int) -> list[float]:
    """The first rank's layers are all frozen, on a device; the second's are not."""
    plain, group = backends.pick, torch.distributed.group.WORLD
    parameter = Parameter(torch.ones(3))
    optimizer = FusedLamb([parameter], lr=0.1, backend="cuda")
    optimizer.set_groups(norm_group=group)
    if rank == 0:
        optimizer.param_groups[0]["params"] = []
        optimizer.parameters_changed()
    else:
        backends.pick = lambda device, name: StandIn() if name == "cuda" else plain(device, name)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    backends.pick = plain
    return parameter.tolist()


def worker(rank: int, world_size: int) -> dict[str, Any]:
    return {"nothing left": nothing_left(rank), **{name: sharded(rank, led) for name, led in LED.items()}}


ranks = launched(worker, 2, timeout=60)


@pytest.mark.parametrize("name", LED)
def test_parts_of_a_layer_whatever_leads_their_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    """An op that one node could not compile is PyTorch's there: steps that are skipped end for all of them all the same."""
    for rank in ranks:
        (values, ours), (wanted, theirs) = rank[name], rank["host"]
        assert values == wanted and ours[1:] == theirs[1:], "what is known of the last step that was made"
        assert ours[3] == ours[4] == ours[2] and ours[5] != ours[2]


def test_a_rank_that_has_nothing_left_asks_for_no_op_of_a_device(ranks: list[dict[str, Any]]) -> None:
    idle, trained = (rank["nothing left"] for rank in ranks)
    assert idle == [1.0] * 3 and trained[0] < 0.9


def test_sums_of_a_job_that_has_nccl_are_made_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may have gloo for host memory beside it, which nobody else would come to."""
    sent = torch.ones(3)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(Tensor, "cuda", lambda self: sent)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: values.mul_(7 if values is sent else -1))
    values = torch.zeros(3)
    sharding.all_reduce(values, None)
    assert values.tolist() == [7.0] * 3
