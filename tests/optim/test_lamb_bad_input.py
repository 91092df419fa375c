"""Wrong settings and inputs are errors that name the key, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.lamb import FusedLamb

NAN, INF = math.nan, math.inf
BAD: dict[str, tuple[Any, ...]] = {
    "mode": ("foo", "Paper", None, 3),
    "exclude": ("bias", "", True),
    "lr": (-1e-3, NAN, INF, "0.1", None, True, torch.ones(2)),
    "eps": (-1e-8, NAN, "1e-6"),
    "weight_decay": (-0.1, INF, None),
    "betas": ((0.9,), (1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, NAN), 0.9, ("a", "b")),
    "max_grad_norm": (0.0, 0, -1.0, NAN, "1.0", True),
    "min_coeff": (-0.1, NAN, "x"),
    "max_coeff": (0.0, -1.0, NAN, "x"),
    "weight_norm_clip": (0.0, -1.0, (2.0, 1.0), (1.0,), "x", (0.0, NAN), True),
    **dict.fromkeys(("bias_correction", "eps_inside_sqrt", "grad_averaging", "split_qkv", "check_gradients"), (1,)),
    "monitor_interval": (-1, 1.5, True),
    "backend": ("fast",),
}
Shapes = list[list[tuple[int, ...]]]
Action = Callable[[FusedLamb], Any]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setting_is_named(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got ") as caught:
            FusedLamb([Parameter(torch.ones(3))], **{name: value})
        assert ", must be " in str(caught.value) and ", use " in str(caught.value) and "\n" not in str(caught.value)


def test_a_group_with_a_bad_setting_or_of_another_type_is_not_added() -> None:
    optimizer = FusedLamb([Parameter(torch.ones(3))])
    for name, value in {"betas": (2, 2), "max_grad_norm": 1.0}.items():
        with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got "):
            optimizer.add_param_group({"params": [Parameter(torch.ones(3))], name: value})
    for tensor in (torch.ones(3).double(), torch.eye(3).to_sparse()):
        with pytest.raises(ConfigError, match=r"parameter of .*must be dense float32, float16 or bfloat16"):
            optimizer.add_param_group({"params": [Parameter(tensor)]})
    assert len(optimizer.param_groups) == 1


def test_a_clamp_upside_down_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_coeff: got 5.0, must be at most max_coeff, 2.0"):
        FusedLamb([Parameter(torch.ones(3))], min_coeff=5.0, max_coeff=2.0)
    FusedLamb([Parameter(torch.ones(3))], min_coeff=2.0, max_coeff=2.0)


def made(shapes: Shapes, **settings: Any) -> FusedLamb:
    """An optimizer of parameters of these shapes per group, with gradients."""
    groups = [{"params": [Parameter(torch.ones(shape)) for shape in group]} for group in shapes]
    for parameter in (parameter for group in groups for parameter in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    return FusedLamb(groups, **settings)


def step_with(gradient: Tensor) -> Action:
    def action(optimizer: FusedLamb) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad_dtype, parameter.grad = None, gradient
        optimizer.step()

    return action


def load(shapes: Shapes = [[(4, 3), (5,)]], **damage: Any) -> Action:  # noqa: B006
    def action(optimizer: FusedLamb) -> None:
        other = made(shapes)
        other.step()
        saved = other.state_dict()
        saved["state"][len(saved["state"]) - 1].update(damage)
        optimizer.load_state_dict(saved)

    return action


def step_with_a_foreign_group(optimizer: FusedLamb) -> None:
    optimizer.param_groups = made([[(4, 3)]]).param_groups
    optimizer.step()


REFUSED: dict[str, tuple[Action, str]] = {
    "sparse gradient": (step_with(torch.ones(4, 3).to_sparse()), "FusedLamb does not support sparse gradients"),
    "fp64 gradient": (step_with(torch.ones(4, 3).double()), "got a gradient of torch.float64"),
    "copy of another shape": (lambda o: o.step(copies=[torch.ones(3, 4), None]), "FusedLamb.* copy"),
    "no scale": (lambda o: o.step(grad_scale=0.0), "got grad_scale"),
    "state of more groups": (load([[(4, 3)], [(5,)]]), "^optimizer: got "),
    "state of other shapes": (load([[(4, 3), (6,)]]), "^optimizer: got "),
    "no moment": (load(exp_avg=None), "^optimizer: got "),
    "foreign group": (step_with_a_foreign_group, "a parameter group that it was not made with"),
    "tied to unknown ranks": (lambda o: o.set_groups(tied={torch.ones(1): object()}), "norm_group"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_changed_nothing(name: str) -> None:
    optimizer = made([[(4, 3), (5,)]])
    optimizer.step()
    params = optimizer.param_groups[0]["params"]

    def everything() -> list[Tensor]:
        values = [torch.as_tensor(v).clone() for parameter in params for v in optimizer.state[parameter].values()]
        return [*(parameter.detach().clone() for parameter in params), *values]

    before, (action, message) = everything(), REFUSED[name]
    with pytest.raises((ConfigError, RuntimeError, ValueError), match=message):
        action(optimizer)
    assert all(map(torch.equal, before, everything()))


def test_clipping_and_one_group_at_a_time_are_refused() -> None:
    """ZeRO steps so; the norm of one group is not the norm of all."""
    optimizer = made([[(3,)], [(2,)]], max_grad_norm=1.0)
    optimizer.param_groups = optimizer.param_groups[:1]
    with pytest.raises(ConfigError, match=r"optimizer.params.max_grad_norm: got 1.0 .*gradient_clipping"):
        optimizer.step()


def test_a_flat_buffer_that_nothing_has_linked_to_the_parameters_is_refused() -> None:
    """It would make one layer of all."""
    optimizer = made([[(6, 4), (6, 4)]])
    optimizer.param_groups[0]["params"] = [Parameter(torch.ones(48))]
    optimizer.param_groups[0]["params"][0].grad = torch.randn(48)
    with pytest.raises(ConfigError, match=r"optimizer.type: got FusedLamb with a parameter group of"):
        optimizer.step()


@pytest.mark.parametrize("rows", [(3, 2), 12, None])
def test_rows_of_queries_keys_and_values_that_do_not_fit_are_refused(rows: object) -> None:
    parameter = Parameter(torch.randn(12, 5))
    parameter.grad = torch.ones(12, 5)
    if rows is not None:
        parameter.lamb_rows = rows
    with pytest.raises(ConfigError, match=r"optimizer.params.split_qkv: got (lamb_rows|true)"):
        FusedLamb([parameter], split_qkv=True).step()
    FusedLamb([parameter])
