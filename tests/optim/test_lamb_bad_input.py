"""What a user can get wrong is an error that names the key, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
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
OF_GROUPS = [("mode", "foo"), ("eps", -1.0), ("betas", (2, 2)), ("max_grad_norm", 1.0)]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_setting_is_named(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got ") as caught:
            FusedLamb([Parameter(torch.ones(3))], **{name: value})
        assert ", must be " in str(caught.value) and ", use " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), OF_GROUPS)
def test_a_bad_setting_of_a_group_is_named(name: str, value: Any) -> None:
    optimizer = FusedLamb([Parameter(torch.ones(3))])
    with pytest.raises(ConfigError, match=rf"^optimizer\.params\.{name}: got "):
        optimizer.add_param_group({"params": [Parameter(torch.ones(3))], name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"min_coeff": 5.0, "max_coeff": 2.0}, "min_coeff: got 5.0, must be at most max_coeff, 2.0"),
     ({"mode": "deepspeed", "min_coeff": 20.0}, "must be at most max_coeff, 10.0")],
)  # fmt: skip
def test_a_clamp_upside_down_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FusedLamb([Parameter(torch.ones(3))], **settings)
    FusedLamb([Parameter(torch.ones(3))], min_coeff=2.0, max_coeff=2.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn, None], ids=str)
def test_parameters_of_other_types_are_refused(dtype: torch.dtype | None) -> None:
    tensor = torch.eye(3).to_sparse() if dtype is None else torch.ones(3).to(dtype)
    with pytest.raises(ConfigError, match=f"parameter of {dtype or ''}.*must be dense float32, float16 or bfloat16"):
        FusedLamb([Parameter(tensor, requires_grad=tensor.element_size() != 1)])


@pytest.fixture
def stepped() -> Iterator[tuple[list[Parameter], FusedLamb]]:
    """Two parameters after a step; what the test asks of them must not change anything."""
    params = [Parameter(torch.ones(4, 3)), Parameter(torch.ones(5))]
    optimizer = FusedLamb(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def everything() -> list[torch.Tensor]:
        values = [torch.as_tensor(v).clone() for parameter in params for v in optimizer.state[parameter].values()]
        return [*(parameter.detach().clone() for parameter in params), *values]

    before = everything()
    yield params, optimizer
    assert all(map(torch.equal, before, everything()))


Stepped = tuple[list[Parameter], FusedLamb]


def test_sparse_gradients_and_gradients_of_other_types_are_refused(stepped: Stepped) -> None:
    params, optimizer = stepped
    params[0].grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(RuntimeError, match="FusedLamb does not support sparse gradients"):
        optimizer.step()
    params[0].grad_dtype = None
    params[0].grad = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"got a gradient of torch.float64"):
        optimizer.step()


@pytest.mark.parametrize(
    "copies",
    [[None], [None] * 3, [torch.ones(3, 4), None], [torch.ones(4, 3, dtype=torch.int32), None], [None, torch.ones(5).double()]],
    ids=["too few", "too many", "shape", "integers", "fp64"],
)  # fmt: skip
def test_copies_that_do_not_fit_are_refused(stepped: Stepped, copies: list[torch.Tensor | None]) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"FusedLamb.* (copy|copies)"):
        stepped[1].step(copies=copies)


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF])
def test_a_bad_loss_scale_is_refused(stepped: Stepped, scale: float) -> None:
    with pytest.raises(ValueError, match="got grad_scale"):
        stepped[1].step(grad_scale=scale)


Shapes = list[list[tuple[int, ...]]]
OTHERS: list[Shapes] = [
    [[(4, 3)]], [[(4, 3)], [(5,)]], [[(4, 3), (5,), (5,)]], [[(4, 3), (6,)]], [[(3, 4), (5,)]],
]  # fmt: skip


def state_of(shapes: Shapes) -> dict[str, Any]:
    """The state dict of an optimizer of these shapes per group, after a step."""
    groups = [{"params": [Parameter(torch.ones(shape)) for shape in group]} for group in shapes]
    optimizer = FusedLamb(groups)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("other", [*OTHERS, {"exp_avg": None}, {"exp_avg_sq": 3}, {"step": -1}], ids=str)
def test_a_state_of_another_model_or_a_damaged_one_is_refused(stepped: Stepped, other: Any) -> None:
    state = state_of(other if isinstance(other, list) else [[(4, 3), (5,)]])
    if isinstance(other, dict):
        state["state"][1].update(other)
    with pytest.raises(ConfigError, match=r"^optimizer: got "):
        stepped[1].load_state_dict(state)


def test_clipping_and_one_group_at_a_time_are_refused() -> None:
    """ZeRO steps so; the norm of one group is not the norm of all."""
    params = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
    optimizer = FusedLamb([{"params": [parameter]} for parameter in params], max_grad_norm=1.0)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.param_groups = optimizer.param_groups[:1]
    with pytest.raises(ConfigError, match=r"optimizer.params.max_grad_norm: got 1.0 .*gradient_clipping"):
        optimizer.step()


def test_a_foreign_group_and_tied_weights_of_unknown_ranks_are_refused(stepped: Stepped) -> None:
    params, optimizer = stepped
    with pytest.raises(ConfigError, match="norm_group"):
        optimizer.set_groups(tied={params[0]: object()})
    optimizer.param_groups = [{**optimizer.param_groups[0], "params": [Parameter(torch.ones(4, 3))]}]
    with pytest.raises(ConfigError, match="a parameter group that it was not made with"):
        optimizer.step()


@pytest.mark.parametrize("shapes", [((24,), (24,)), ((48,),), ((6, 4),)], ids=str)
def test_unknown_tensors_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Flat buffers that nothing has linked to the parameters would make one layer of all."""
    optimizer = FusedLamb([Parameter(torch.randn(6, 4)) for _ in range(2)])
    optimizer.param_groups[0]["params"] = flats = [Parameter(torch.ones(shape)) for shape in shapes]
    for flat in flats:
        flat.grad = torch.randn(flat.shape)
    with pytest.raises(ConfigError, match=r"optimizer.type: got FusedLamb with a parameter group of"):
        optimizer.step()
    assert all(flat.eq(1).all() for flat in flats)
