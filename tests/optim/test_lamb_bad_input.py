"""What a user can get wrong is an error that names the key, before anything has changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.lamb import FusedLamb

BAD: list[tuple[str, Any]] = [
    *[("mode", value) for value in ("foo", "Paper", None, 3)],
    *[("exclude", value) for value in ("bias", "", True)],
    *[("lr", value) for value in (-1e-3, math.nan, math.inf, "0.1", None, True, torch.ones(2))],
    *[("eps", value) for value in (-1e-8, math.nan, "1e-6")],
    *[("weight_decay", value) for value in (-0.1, math.inf, None)],
    *[("betas", value) for value in ((0.9,), (1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), 0.9, ("a", "b"))],
    *[("max_grad_norm", value) for value in (0.0, 0, -1.0, math.nan, "1.0", True)],
    *[("min_coeff", value) for value in (-0.1, math.nan, "x")],
    *[("max_coeff", value) for value in (0.0, -1.0, math.nan, "x")],
    *[("weight_norm_clip", value) for value in (0.0, -1.0, (2.0, 1.0), (1.0,), "x", (0.0, math.nan), True)],
    *[(name, 1) for name in ("bias_correction", "eps_inside_sqrt", "grad_averaging", "split_qkv")],
    *[("monitor_interval", value) for value in (-1, 1.5, True)],
    ("check_gradients", 1),
    ("backend", "fast"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_bad_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got ") as caught:
        FusedLamb([Parameter(torch.ones(3))], **{name: value})
    assert ", must be " in str(caught.value) and ", use " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("mode", "foo"), ("eps", -1.0), ("betas", (2, 2)), ("max_grad_norm", 1.0)])
def test_a_bad_setting_of_a_group_is_named(name: str, value: Any) -> None:
    optimizer = FusedLamb([Parameter(torch.ones(3))])
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got "):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))], name: value})
    assert len(optimizer.param_groups) == 1


def test_a_clamp_upside_down_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_coeff: got 5.0, must be at most max_coeff, 2.0"):
        FusedLamb([Parameter(torch.ones(3))], min_coeff=5.0, max_coeff=2.0)
    with pytest.raises(ConfigError, match=r"must be at most max_coeff, 10.0"):
        FusedLamb([Parameter(torch.ones(3))], mode="deepspeed", min_coeff=20.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_parameters_of_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"parameter of {dtype}.*must be dense float32, float16 or bfloat16"):
        FusedLamb([Parameter(torch.ones(3).to(dtype), requires_grad=dtype.itemsize != 1)])


def test_sparse_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be dense"):
        FusedLamb([Parameter(torch.eye(3).to_sparse())])


def with_state() -> tuple[list[Parameter], FusedLamb, list[torch.Tensor]]:
    """Two parameters after a step, and copies of all that a step changes."""
    params = [Parameter(torch.ones(4, 3)), Parameter(torch.ones(5))]
    optimizer = FusedLamb(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return params, optimizer, kept(params, optimizer)


def kept(params: list[Parameter], optimizer: FusedLamb) -> list[torch.Tensor]:
    tensors = [parameter.detach().clone() for parameter in params]
    for parameter in params:
        tensors += [torch.as_tensor(value).clone() for value in optimizer.state[parameter].values()]
    return tensors


def test_sparse_gradients_are_refused_and_nothing_changes() -> None:
    params, optimizer, before = with_state()
    params[0].grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(RuntimeError, match="FusedLamb does not support sparse gradients"):
        optimizer.step()
    assert all(map(torch.equal, before, kept(params, optimizer)))


def test_gradients_of_other_types_are_refused_and_nothing_changes() -> None:
    params, optimizer, before = with_state()
    params[0].grad_dtype = None
    params[0].grad = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"got a gradient of torch.float64"):
        optimizer.step()
    assert all(map(torch.equal, before, kept(params, optimizer)))


@pytest.mark.parametrize(
    "copies",
    [
        [None],
        [None] * 3,
        [torch.ones(3, 4), None],
        [torch.ones(4, 3, dtype=torch.int32), None],
        [None, torch.ones(5).double()],
    ],
    ids=["too few", "too many", "shape", "integers", "fp64"],
)
def test_copies_that_do_not_fit_are_refused_and_nothing_changes(copies: list[torch.Tensor | None]) -> None:
    params, optimizer, before = with_state()
    with pytest.raises((RuntimeError, ValueError), match=r"FusedLamb.* (copy|copies)"):
        optimizer.step(copies=copies)
    assert all(map(torch.equal, before, kept(params, optimizer)))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_loss_scale_is_refused(scale: float) -> None:
    params, optimizer, before = with_state()
    with pytest.raises(ValueError, match="got grad_scale"):
        optimizer.step(grad_scale=scale)
    assert all(map(torch.equal, before, kept(params, optimizer)))


def other_state(shapes: list[list[tuple[int, ...]]]) -> dict[str, Any]:
    """The state dict of an optimizer of these shapes per group, after a step."""
    groups = [{"params": [Parameter(torch.ones(shape)) for shape in group]} for group in shapes]
    optimizer = FusedLamb(groups)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    "shapes", [[[(4, 3)]], [[(4, 3)], [(5,)]], [[(4, 3), (5,), (5,)]], [[(4, 3), (6,)]], [[(3, 4), (5,)]]], ids=str
)
def test_the_state_of_another_model_is_refused_and_nothing_changes(shapes: list[list[tuple[int, ...]]]) -> None:
    params, optimizer, before = with_state()
    with pytest.raises(ConfigError, match=r"^optimizer: got "):
        optimizer.load_state_dict(other_state(shapes))
    assert all(map(torch.equal, before, kept(params, optimizer)))


@pytest.mark.parametrize("change", [{"exp_avg": None}, {"exp_avg_sq": 3}, {"step": -1}], ids=str)
def test_a_damaged_state_is_refused_and_nothing_changes(change: dict[str, Any]) -> None:
    params, optimizer, before = with_state()
    state = other_state([[(4, 3), (5,)]])
    state["state"][1].update(change)
    with pytest.raises(ConfigError, match=r"^optimizer: got "):
        optimizer.load_state_dict(state)
    assert all(map(torch.equal, before, kept(params, optimizer)))


def test_clipping_and_one_group_at_a_time_are_refused() -> None:
    """ZeRO steps so; the norm of one group is not the norm of all."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = FusedLamb([{"params": [parameter]} for parameter in params], max_grad_norm=1.0)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups = optimizer.param_groups[:1]
    with pytest.raises(ConfigError, match=r"optimizer.params.max_grad_norm: got 1.0 .*gradient_clipping"):
        optimizer.step()


def test_a_foreign_group_is_refused() -> None:
    _, optimizer, _ = with_state()
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [Parameter(torch.ones(4, 3))]}]
    with pytest.raises(ConfigError, match="a parameter group that it was not made with"):
        optimizer.step()


def test_tied_weights_need_all_ranks() -> None:
    params, optimizer, _ = with_state()
    with pytest.raises(ConfigError, match="norm_group"):
        optimizer.set_groups(tied={params[0]: object()})
