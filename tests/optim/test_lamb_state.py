"""All that is kept between steps: state dicts of ours and of others, copies, skipped and priming steps, the monitor."""

import copy
import io
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb

from .tables import same

# Keys that the ``step`` of DeepSpeed's, apex's and timm's LAMB read from a group.
READ_BY_OTHERS = {
    "lr", "bias_correction", "betas", "eps", "weight_decay", "max_grad_norm", "max_coeff", "min_coeff", "grad_averaging", "step",
    "trust_clip", "always_adapt", "caution", "decoupled_decay", "corrected_weight_decay", "max_lr_snapshot", "foreach",
}  # fmt: skip


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((12, 5), (7,), (2, 3, 2, 2))]


def run(params: list[Parameter], optimizer: FusedLamb, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def groups_of(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0, "lr": 0.02}]


def snapshot(params: list[Parameter], optimizer: FusedLamb) -> list[Tensor]:
    """Everything that a step changes."""
    states = [torch.as_tensor(v).clone() for p in params for _, v in sorted(optimizer.state[p].items())]
    return [*(parameter.detach().clone() for parameter in params), *states]


Both = tuple[list[Parameter], FusedLamb]


def saved_and_loaded(params: list[Parameter], optimizer: FusedLamb) -> Both:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = [Parameter(parameter.detach().clone()) for parameter in params]
    other = FusedLamb(groups_of(fresh), max_grad_norm=0.5, backend=optimizer.backend)
    saved, seen = torch.load(file, weights_only=True), []
    saved["param_groups"].reverse()
    other.register_load_state_dict_pre_hook(lambda _, given: {**given, "param_groups": given["param_groups"][::-1]})
    other.register_load_state_dict_post_hook(lambda _: seen.extend(other.state[p]["exp_avg"].dtype for p in fresh))
    other.load_state_dict(saved)
    assert seen == [torch.float32] * 3 and len(other._optimizer_load_state_dict_pre_hooks) == 1
    return fresh, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [saved_and_loaded, lambda *both: copy.deepcopy(both)])
def test_training_goes_on_bit_for_bit(way: Callable[..., Both], dtype: torch.dtype, backend: str) -> None:
    params, straight = parameters(dtype), parameters(dtype)
    optimizer, reference = (FusedLamb(groups_of(p), max_grad_norm=0.5, backend=backend) for p in (params, straight))
    run(params, optimizer, range(3))
    other_params, other = way(params, optimizer)
    assert all(other.state[parameter]["exp_avg"].dtype == torch.float32 for parameter in other_params)
    run(other_params, other, range(3, 6))
    run(straight, reference, range(6))
    assert same(snapshot(other_params, other), snapshot(straight, reference))
    assert [group["lr"] for group in other.param_groups] == [1e-3, 0.02]


@pytest.mark.parametrize("whose", ["DeepSpeed", "apex", "timm"])
def test_the_state_of_others_is_taken(whose: str) -> None:
    """Their states, of 4 steps: DeepSpeed counts per parameter, apex and timm per group, timm in a tensor."""
    params = parameters()
    moments = [(torch.randn_like(p), torch.rand_like(p)) for p in params]
    state: dict[int, Any] = {i: {"exp_avg": m.detach(), "exp_avg_sq": v.detach()} for i, (m, v) in enumerate(moments)}
    group: dict[str, Any] = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.3, "bias_correction": True}
    group |= {"params": [0, 1, 2], "max_grad_norm": 1.0}
    if whose == "DeepSpeed":
        group |= {"max_coeff": 10.0, "min_coeff": 0.01}
        for values in state.values():
            values["step"] = 4
    else:
        group |= {"step": torch.tensor(4.0) if whose == "timm" else 4, "grad_averaging": True, "trust_clip": False}
    optimizer = FusedLamb(params, mode="nvlamb", max_coeff=7.0)
    optimizer.load_state_dict({"state": state, "param_groups": [group]})
    now = optimizer.param_groups[0]
    assert (now["lr"], now["betas"], now["eps"], now["weight_decay"]) == (0.5, (0.8, 0.9), 1e-8, 0.3)
    assert (now["mode"], now["max_coeff"], optimizer.max_grad_norm) == ("nvlamb", 7.0, 0.0) and "trust_clip" not in now
    for parameter, (m, v) in zip(params, moments, strict=True):
        values = optimizer.state[parameter]
        assert values["step"] == 4 and torch.equal(values["exp_avg"], m) and torch.equal(values["exp_avg_sq"], v)
    run(params, optimizer, range(1))
    assert optimizer.state[params[0]]["step"] == 5


def test_others_go_on_from_our_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's Python code runs on it; its CUDA op is a stand-in that notes what it is called with."""
    from deepspeed.ops.lamb import fused_lamb

    calls: list[tuple] = []
    op = SimpleNamespace(lamb=lambda *arguments: calls.append(arguments) or torch.ones(1))
    monkeypatch.setattr(fused_lamb, "FusedLambBuilder", lambda: SimpleNamespace(load=lambda: op))
    params = parameters()
    ours = FusedLamb(params, mode="deepspeed", lr=0.02)
    assert ours.state_dict()["param_groups"][0]["step"] == 0, "before the first one"
    run(params, ours, range(3))
    saved = ours.state_dict()
    assert all(group.keys() >= READ_BY_OTHERS for group in saved["param_groups"])
    steps = [values["step"] for values in (*saved["param_groups"], *saved["state"].values())]
    assert steps == [3] * len(steps) and {type(step) for step in steps} == {int}
    theirs = fused_lamb.FusedLamb(params)
    theirs.load_state_dict(saved)
    theirs.step()
    for parameter, call in zip(params, calls, strict=True):
        state = ours.state[parameter]
        assert torch.equal(call[2], state["exp_avg"]) and torch.equal(call[3], state["exp_avg_sq"])
        # lr, betas, max_coeff, min_coeff, eps, scale, step, eps outside the root, bias correction, decay
        assert call[5:] == (0.02, 0.9, 0.999, 10.0, 0.01, 1e-6, 1.0, 4, 1, 1, 0.01)


@pytest.mark.parametrize("found", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_step_with_a_bad_gradient_changes_nothing(found: float, backend: str, caplog: pytest.LogCaptureFixture) -> None:
    for clips in (None, 0.5):
        params = parameters()
        optimizer = FusedLamb(groups_of(params), max_grad_norm=clips, backend=backend)
        run(params, optimizer, range(2))
        before = snapshot(params, optimizer)
        params[1].grad[3] = found
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            optimizer.step()
        assert same(before, snapshot(params, optimizer))
        assert optimizer.skipped_steps == 1 and "skipped a step" in caplog.text
        run(params, optimizer, range(2, 3))
        assert optimizer.state[params[0]]["step"] == 3 and optimizer.skipped_steps == 1


def test_a_priming_step_counts_nothing(backend: str) -> None:
    """Before the first step gradients of zero do nothing, not even decay; afterwards they are gradients like others."""
    params = parameters()
    start = [parameter.detach().clone() for parameter in params]
    optimizer = FusedLamb(params, weight_decay=0.1, backend=backend)
    for counted in (0, 2):
        for parameter in params:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert [optimizer.state[parameter]["step"] for parameter in params] == [counted] * 3
        assert optimizer.skipped_steps == 0 and same(start, [p.detach() for p in params]) == (counted == 0)
        run(params, optimizer, range(1))
    assert optimizer.step(torch.is_grad_enabled) is True, "the result of a closure"


def test_grad_scaler_leaves_the_unscaling_to_the_step(backend: str) -> None:
    """The same parameters as without it, and a step of too large a scale is skipped."""
    scaled, reference = parameters(), parameters()
    first, second = FusedLamb(scaled, backend=backend), FusedLamb(reference, backend=backend)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for seed in range(5):
        overflows, unscales = seed == 3, seed == 4
        generator = torch.Generator().manual_seed(seed)
        for one, other in zip(scaled, reference, strict=True):
            other.grad = torch.randn(other.shape, generator=generator)
            one.grad = other.grad * scaler.scale(torch.ones(()))
        if overflows:
            scaled[0].grad[0, 0] = torch.inf
        else:
            second.step()
        if unscales:
            scaler.unscale_(first)
        scaler.step(first)
        scaler.update()
        assert same(snapshot(scaled, first), snapshot(reference, second)), seed
        assert (scaler.get_scale(), first.skipped_steps) == ((1024.0, 0) if seed < 3 else (512.0, 1))


def test_statistics_are_those_of_the_step_and_the_monitor_is_told(backend: str) -> None:
    events: list[tuple[str, float, int]] = []
    params = parameters()
    optimizer = FusedLamb(params, max_coeff=1.2, max_grad_norm=1.0, monitor_interval=2, backend=backend)
    optimizer.set_names({params[0]: "weight"})
    optimizer.set_monitor(events.extend)
    run(params, optimizer, range(5))
    assert [step for tag, _, step in events if tag.endswith("min_trust_ratio")] == [2, 4]
    start = [parameter.detach().double() for parameter in params]
    run(params, optimizer, range(5, 6))
    layers = optimizer.statistics()
    assert [layer.name for layer in layers] == ["weight", "group0.1", "group0.2"]
    for layer, old, new in zip(layers, start, params, strict=True):
        assert layer.weight_norm == pytest.approx(old.norm().item(), rel=1e-6)
        assert layer.trust_ratio == pytest.approx(min(1.2, layer.weight_norm / layer.update_norm), rel=1e-12)
        assert layer.clamped == (layer.weight_norm / layer.update_norm > 1.2)
        length = 1e-3 * layer.trust_ratio * layer.update_norm  # parameters of 1 round by 6e-8
        assert (new.detach().double() - old).norm().item() == pytest.approx(length, rel=1e-3)
    assert 0 < sum(layer.clamped for layer in layers) < 3
    last = {tag.rpartition("/")[2]: value for tag, value, step in events if step == 6}
    ratios = [layer.trust_ratio for layer in layers]
    norm = torch.cat([p.grad.reshape(-1) for p in params]).norm().item()
    assert (last["min_trust_ratio"], last["max_trust_ratio"]) == (min(ratios), max(ratios))
    assert last["mean_trust_ratio"] == pytest.approx(sum(ratios) / 3, rel=1e-12)
    assert last["clamped_share"] == sum(layer.clamped for layer in layers) / 3
    assert last["gradient_norm"] == pytest.approx(norm, rel=1e-6)
