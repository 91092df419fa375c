"""FusedLamb against LAMB in float64, and against what other implementations give."""

import json
from functools import partial
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb
from ds_terapipe.optim.modes import ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT
from ds_terapipe.optim.op import step_tensors

from .oracle import MAX_GRAD_NORM, RATIO_TOLERANCE, SCALE, STEP_TOLERANCE, Oracle, gradients, parameters, step_error

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TIGHT, LR = {"min_coeff": 0.08, "max_coeff": 0.3}, 0.01
# arguments of FusedLamb, and those of the oracle for it
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({}, {}),
    "deepspeed": ({"mode": "deepspeed"}, {"flags": ADAPT | CORRECT_STEP, "min_coeff": 0.01, "max_coeff": 10.0}),
    "deepspeed tight": ({"mode": "deepspeed", **TIGHT}, {"flags": ADAPT | CORRECT_STEP, **TIGHT}),
    "nvlamb": ({"mode": "nvlamb", "weight_decay": 0.0}, {"weight_decay": 0.0}), "apex": ({"mode": "apex"}, {}),
    "apex without decay": ({"mode": "apex", "weight_decay": 0.0}, {"weight_decay": 0.0, "flags": CORRECT_MOMENTS}),
    "excluded": ({"exclude": "bias_norm"}, {"excludes": True}),
    "phi": ({"weight_norm_clip": (0.1, 0.5)}, {"min_weight_norm": 0.1, "max_weight_norm": 0.5}),
    "eps inside": ({"eps_inside_sqrt": True}, {"flags": ADAPT | CORRECT_MOMENTS | EPS_INSIDE_SQRT}),
    "no averaging": ({"grad_averaging": False}, {"beta3": 1.0}), "unchecked": ({"check_gradients": False}, {}),
    "no correction": ({"bias_correction": False}, {"flags": ADAPT}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_oracles(name: str, backend: str) -> None:
    """Steps and ratios, with gradients clipped by the norm of all of them behind the loss scale."""
    given, switches = VARIANTS[name]
    params = parameters()
    op = FusedLamb(params, LR, max_grad_norm=MAX_GRAD_NORM, backend=backend, **{"weight_decay": 0.01, **given})
    right = Oracle(MAX_GRAD_NORM, SCALE, **switches)
    for number, grads in enumerate(gradients(200 if name in ("paper", "deepspeed") else 10), start=1):
        before = [parameter.detach().clone() for parameter in params]
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad = gradient
        op.step(grad_scale=SCALE)
        expected, ratios = right.step(before, grads)
        if number in (1, 2, 10, 200):
            errors = [step_error(*three) for three in zip(before, params, expected, strict=True)]
            assert max(errors) <= STEP_TOLERANCE, (number, errors)
            assert [layer.trust_ratio for layer in op.statistics()] == pytest.approx(ratios, rel=RATIO_TOLERANCE)


@pytest.mark.parametrize("types", [(FP16, FP32, BF16), (BF16, BF16, FP32), (FP32, BF16, FP16)], ids=str)
def test_types_of_parameters_gradients_and_copies(types: tuple[torch.dtype, ...], backend: str) -> None:
    """The step is the oracle's from the stored parameter, and rounded to nearest once; so are copies of it."""
    parameter_type, gradient_type, copy_type = types
    params = parameters(parameter_type)
    right, optimizer = Oracle(scale=SCALE), FusedLamb(params, lr=LR, backend=backend)
    copies = [torch.full_like(parameter, torch.nan, dtype=copy_type) for parameter in params]
    copies[2] = copies[2].to(memory_format=torch.channels_last)
    for grads in gradients(3, gradient_type):
        before = [parameter.detach().clone() for parameter in params]
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad_dtype = None  # lets the gradient be of another type
            parameter.grad = gradient
        optimizer.step(grad_scale=SCALE, copies=[*copies[:3], None, copies[4]])
        wanted, _ = right.step(before, grads)
        for old, want, stored in zip(before * 2, wanted * 2, [*params, *copies], strict=True):
            assert stored.isnan().all() if stored is copies[3] else step_error(old, stored, want) <= STEP_TOLERANCE


def test_groups_have_settings_of_their_own(backend: str) -> None:
    """Each of three groups moves as it does in an optimizer of its own, with a rate in a tensor; the last is added late."""
    settings: list[dict[str, Any]] = [
        {"lr": 0.1, "betas": (0.8, 0.99), "mode": "deepspeed", "eps": 1e-8},
        {"lr": 0.02, "weight_decay": 0.2, "weight_norm_clip": 1.0},
        {"mode": "apex", "weight_decay": 0.0, "max_coeff": 0.5},
    ]
    together, apart = parameters(), parameters()
    groups = [{"params": together[i::3], **values} for i, values in enumerate(settings)]
    first = FusedLamb(groups[:2], backend=backend)
    rates = [torch.tensor(values.get("lr", 1e-3), dtype=torch.float64) for values in settings]
    others = [FusedLamb(apart[i::3], backend=backend, **{**settings[i], "lr": rates[i]}) for i in range(3)]
    for number, grads in enumerate(gradients(4)):
        for one, other, gradient in zip(together, apart, grads, strict=True):
            one.grad, other.grad = gradient, gradient
        if number == 2:
            first.add_param_group(groups[2])
        for optimizer in (first, *others[: 2 + (number > 1)]):
            optimizer.step(grad_scale=SCALE)
    assert all(map(torch.equal, together, apart))


FILES = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "golden").glob("*.json")}
CASES = [(name, case["name"]) for name, data in sorted(FILES.items()) for case in data["cases"]]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_mode_is_what_it_is_named_after(name: str, case: str, backend: str) -> None:
    """Numbers of files that name their source: errors of a step add up, and so do roundings of stored parameters."""
    data = FILES[name]
    (golden,) = (each for each in data["cases"] if each["name"] == case)

    def tensors(rows: list[list[float]]) -> list[Tensor]:
        return [torch.tensor(r, dtype=torch.float64).reshape(s) for r, s in zip(rows, data["shapes"], strict=True)]

    old = tensors(data["parameters"])
    params = [Parameter(tensor.float()) for tensor in old]
    optimizer = FusedLamb(params, backend=backend, **golden["arguments"])
    allowed = [torch.zeros(()).double() for _ in params]
    for grads, after in zip(data["gradients"], golden["after"], strict=True):
        for parameter, gradient in zip(params, tensors(grads), strict=True):
            parameter.grad = gradient.float() * golden["grad_scale"]
        optimizer.step(grad_scale=golden["grad_scale"])
        new = tensors(after)
        for i, parameter in enumerate(params):
            allowed[i] = allowed[i] + STEP_TOLERANCE * (new[i] - old[i]).abs().max() + 6e-8 * new[i].abs().max()
            assert (parameter.detach().double() - new[i]).abs().max() <= allowed[i]
        old = new


def reversed_order(parameter: Tensor) -> Tensor:
    return torch.randn(tuple(parameter.shape)[::-1]).permute(tuple(range(parameter.dim()))[::-1])


def test_orders_of_memory(backend: str) -> None:
    """Transposed, channels last, permuted, with gaps, both, dimensions of one, a scalar, empty; and moved between steps."""
    torch.manual_seed(5)
    tensors = [
        torch.randn(33, 7).t(), torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4, 5).permute(2, 0, 1), torch.randn(33, 14)[:, ::2], torch.randn(33, 14)[:, ::2].t(),
        torch.randn(1, 9, 1).transpose(0, 1), torch.randn(()), torch.randn(3, 0, 2), torch.randn(5),
    ]  # fmt: skip
    params, held = [Parameter(tensor) for tensor in tensors], list[Tensor]()
    optimizer, oracle = FusedLamb(params, lr=LR, max_grad_norm=1.0, backend=backend), Oracle(max_norm=1.0)
    for gradient in (lambda p: torch.randn(p.shape), reversed_order, torch.randn_like):
        before = [parameter.detach().clone() for parameter in params]
        grads = [gradient(parameter.detach()) for parameter in params]
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        expected, ratios = oracle.step(before, grads)
        assert max(step_error(*three) for three in zip(before, params, expected, strict=True)) <= STEP_TOLERANCE
        assert [layer.trust_ratio for layer in optimizer.statistics()] == pytest.approx(ratios, rel=RATIO_TOLERANCE)
        params[1].data = params[1].data.contiguous()  # as `model.to(memory_format=...)` does between steps
        state = optimizer.state[params[8]]
        held += [*grads, params[8].data, state["exp_avg"], state["exp_avg_sq"].data]  # so that no address is taken again
        params[8].data, state["exp_avg"], state["exp_avg_sq"].data = (moved.clone() for moved in held[-3:])
        for moved in held:
            moved.fill_(torch.nan)


def test_parameters_without_gradients_are_left_alone(backend: str) -> None:
    """No decay, no state; and the steps of each parameter are its own."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(50)) for _ in range(3)]
    alone = [Parameter(parameter.detach().clone()) for parameter in params]
    optimizer = FusedLamb(params, backend=backend)
    single = [FusedLamb([parameter], backend=backend) for parameter in alone]
    step = torch.compile(optimizer.step, backend="eager")
    for present in ((0,), (0, 1), (1,), (0, 1)):
        for i in range(3):
            params[i].grad = alone[i].grad = torch.randn(50) if i in present else None
        step()
        for i in present:
            single[i].step()
    assert [optimizer.state[parameter].get("step") for parameter in params] == [3, 3, None]
    assert "exp_avg" not in optimizer.state[params[2]]
    assert all(map(torch.equal, params, alone))


def test_the_default_type_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", partial(torch.empty, dtype=torch.float64))
    assert run_path(step_tensors.__file__)["NOTHING"].dtype == FP32


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
