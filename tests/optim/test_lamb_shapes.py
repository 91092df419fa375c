"""Every order of memory, parameters that come, go and move, and layers that are rows of a parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.lamb import FusedLamb

from .oracle import LR, RATIO_TOLERANCE, STEP_TOLERANCE, Oracle, ratio_error, step_error


def compare(params: list[Parameter], backend: str, gradient: Callable[[Tensor], Tensor] = torch.randn_like) -> None:
    """Two steps of the op from these parameters are the oracle's."""
    optimizer, oracle = FusedLamb(params, lr=LR, max_grad_norm=1.0, backend=backend), Oracle(max_norm=1.0)
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in params]
        grads = [gradient(parameter.detach()) for parameter in params]
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        expected, ratios = oracle.step(before, grads)
        for three in zip(before, params, expected, strict=True):
            assert step_error(*three) <= STEP_TOLERANCE, tuple(three[0].shape)
        for layer, ratio in zip(optimizer.statistics(), ratios, strict=True):
            assert ratio_error(layer.trust_ratio, ratio) <= RATIO_TOLERANCE


def reversed_order(parameter: Tensor) -> Tensor:
    return torch.randn(tuple(parameter.shape)[::-1]).permute(tuple(range(parameter.dim()))[::-1])


@pytest.mark.parametrize(
    "gradient",
    [lambda p: torch.randn(p.shape), reversed_order, torch.randn_like],
    ids=["contiguous", "reversed", "alike"],
)
def test_orders_of_memory(gradient: Callable[[Tensor], Tensor], backend: str) -> None:
    """Transposed, channels last, permuted, with gaps, both, dimensions of one, a scalar, empty."""
    torch.manual_seed(5)
    tensors = [
        torch.randn(33, 7).t(), torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4, 5).permute(2, 0, 1), torch.randn(33, 14)[:, ::2], torch.randn(33, 14)[:, ::2].t(),
        torch.randn(1, 9, 1).transpose(0, 1), torch.randn(()), torch.randn(3, 0, 2), torch.randn(5),
    ]  # fmt: skip
    compare([Parameter(tensor) for tensor in tensors], backend, gradient)


def test_parameters_without_gradients_are_left_alone(backend: str) -> None:
    """No decay, no state; and the steps of each parameter are its own."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(50)) for _ in range(3)]
    alone = [Parameter(parameter.detach().clone()) for parameter in params]
    optimizer = FusedLamb(params, backend=backend)
    single = [FusedLamb([parameter], backend=backend) for parameter in alone]
    for present in ((0,), (0, 1), (1,), (0, 1)):
        for i in range(3):
            params[i].grad = alone[i].grad = torch.randn(50) if i in present else None
        optimizer.step()
        for i in present:
            single[i].step()
    assert [optimizer.state[parameter].get("step") for parameter in params] == [3, 3, None]
    assert "exp_avg" not in optimizer.state[params[2]]
    assert all(map(torch.equal, params, alone))


def test_gradients_parameters_and_moments_may_move_in_memory(backend: str) -> None:
    torch.manual_seed(0)
    steady = Parameter(torch.randn(300))
    moving = Parameter(steady.detach().clone())
    first, second = FusedLamb([steady], backend=backend), FusedLamb([moving], backend=backend)
    held = []  # so that no address is taken again
    for _ in range(3):
        steady.grad = torch.randn(300)
        held.append(torch.zeros(301))
        moving.grad = held[-1][1:].copy_(steady.grad)
        moving.data = moving.data.clone()
        state = second.state[moving]
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg"].clone()
            state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()
        first.step()
        second.step()
    assert torch.equal(steady, moving)


def test_fused_attention_as_three_layers(backend: str) -> None:
    """Rows in turns of 3, 2 and 1 for two heads: the steps of query, key and value are those of matrices of their own."""
    torch.manual_seed(0)
    fused, bias = Parameter(torch.randn(12, 5)), Parameter(torch.randn(12))
    turns = torch.tensor([0, 0, 0, 1, 1, 2] * 2)
    parts = [Parameter(p.detach()[turns == part].clone()) for p in (fused, bias) for part in range(3)]
    fused.lamb_rows = bias.lamb_rows = (3, 2, 1)
    optimizer, apart = FusedLamb([fused, bias], split_qkv=True, backend=backend), FusedLamb(parts, backend=backend)
    for transposed in (False, True):
        fused.grad, bias.grad = torch.randn(12, 5), torch.randn(12)
        for i, part in enumerate(parts):
            part.grad = (fused.grad, bias.grad)[i // 3][turns == i % 3]
        if transposed:
            fused.grad = fused.grad.t().contiguous().t()
        optimizer.step()
        apart.step()
        for i, part in enumerate(parts):
            # The op may round sums of norms in another order; a unit of fp32 of the parameters is 1e-7.
            torch.testing.assert_close((fused, bias)[i // 3][turns == i % 3], part, rtol=0, atol=3e-7)
    names = [layer.name for layer in optimizer.statistics()]
    assert names == [f"group0.{p}[{part}]" for p in (0, 1) for part in range(3)]
    assert len({layer.trust_ratio for layer in optimizer.statistics()}) == 6


@pytest.mark.parametrize("rows", [(3, 2), (0, 12), (), 12, (1.5, 4.5), None])
def test_rows_that_do_not_fit_are_refused(rows: object) -> None:
    parameter = Parameter(torch.randn(12, 5))
    parameter.grad = torch.ones(12, 5)
    if rows is not None:
        parameter.lamb_rows = rows
    with pytest.raises(ConfigError, match=r"optimizer.params.split_qkv: got (lamb_rows|true)"):
        FusedLamb([parameter], split_qkv=True).step()
    FusedLamb([parameter])
