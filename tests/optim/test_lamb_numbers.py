"""FusedLamb against the float64 oracle, and what must hold exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb
from tests.mutants import applied
from tests.optim import checks
from tests.optim.checks import RATIO_TOLERANCE, SCALE, STEP_TOLERANCE, VARIANTS
from tests.optim.oracle import Oracle, Settings

BACKENDS = ("auto", "plain")
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half the distance of neighbours, relative to a number of the type."""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_is_the_oracles(variant: checks.Variant, backend: str) -> None:
    step, ratio = checks.worst_errors(variant, backend)
    assert step <= STEP_TOLERANCE
    assert ratio <= RATIO_TOLERANCE


def off_by(mutant: str | None, *variants: str) -> float:
    """The largest error of steps and ratios under a mutant, in tolerances; for ``tests.mutants``."""
    with applied(mutant):
        found = [checks.worst_errors(checks.BY_NAME[name], "auto", steps=10) for name in variants]
    return max(max(step / STEP_TOLERANCE, ratio / RATIO_TOLERANCE) for step, ratio in found)


def make(sizes: list[float], backend: str, **arguments: Any) -> tuple[list[Parameter], FusedLamb]:
    """Parameters of 400 elements, each with numbers of its own size, and gradients of size 1."""
    generator = torch.Generator().manual_seed(3)
    params = [Parameter(torch.randn(20, 20, generator=generator) * size) for size in sizes]
    for parameter in params:
        parameter.grad = torch.randn(20, 20, generator=generator)
    return params, FusedLamb(params, backend=backend, **arguments)


def moved(params: list[Parameter], action: Callable[[], Any]) -> list[Tensor]:
    """By how much the action moves the parameters, float64."""
    before = [parameter.detach().clone() for parameter in params]
    action()
    return [parameter.detach().double() - old.double() for parameter, old in zip(params, before, strict=True)]


def test_the_step_is_as_long_as_the_weights(backend: str) -> None:
    """|change| = lr |p| whatever the gradients are, and lr phi(|p|) with a clamp of the weight norm."""
    for clip, expected in ((None, (20.0, 2.0, 0.2)), ((1.0, 5.0), (5.0, 2.0, 1.0))):
        params, optimizer = make([1.0, 0.1, 0.01], backend, lr=0.1, weight_norm_clip=clip)
        with torch.no_grad():
            for parameter, length in zip(params, (20.0, 2.0, 0.2), strict=True):
                parameter.mul_(length / torch.linalg.vector_norm(parameter.double()).float())
        for change, length in zip(moved(params, optimizer.step), expected, strict=True):
            # Storing p in fp32 rounds by 6e-8 |p|, up to 6e-7 of the step at this learning rate.
            assert torch.linalg.vector_norm(change).item() == pytest.approx(0.1 * length, rel=2e-6)


def test_the_size_of_the_gradients_does_not_matter(backend: str) -> None:
    """Without decay and eps, gradients 1024 times smaller make the very same steps: powers of two round nothing."""
    results = []
    for factor in (1.0, 1 / 1024):
        params, optimizer = make([1.0, 0.1], backend, lr=0.1, weight_decay=0.0, eps=0.0)
        for _ in range(3):
            for parameter in params:
                parameter.grad = torch.sin(100 * parameter.detach()) * factor
            optimizer.step()
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_zero_weights_move_by_the_plain_update(backend: str) -> None:
    params, optimizer = make([0.0, 1.0], backend, lr=0.1)
    params[0].grad += 0.01 * params[0].grad.sign()
    change = moved(params, optimizer.step)[0]
    expected = -0.1 * params[0].grad.sign()  # in the first step M / sqrt(V) is the sign of the gradient
    assert (change - expected).abs().max() < 1.01e-4 * 0.1  # eps against gradients of at least 0.01
    assert optimizer.statistics()[0].trust_ratio == 1.0


def test_a_zero_update_moves_nothing(backend: str) -> None:
    for eps in (1e-6, 0.0):
        params, optimizer = make([1.0, 1.0], backend, lr=0.1, weight_decay=0.0, eps=eps)
        params[0].grad.zero_()
        changes = moved(params, optimizer.step)
        assert not changes[0].any() and changes[1].all()
        assert optimizer.statistics()[0].trust_ratio == 1.0


def test_with_a_learning_rate_of_zero_only_the_moments_move(backend: str) -> None:
    params, optimizer = make([1.0, 0.0], backend, lr=0.0)
    assert not any(change.any() for change in moved(params, optimizer.step))
    for parameter in params:
        state = optimizer.state[parameter]
        assert state["step"] == 1 and state["exp_avg"].all() and state["exp_avg_sq"].all()


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameter_type", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_parameters(parameter_type: torch.dtype, gradient_type: torch.dtype, backend: str) -> None:
    """The step is the oracle's from the stored parameter, and rounded to nearest once."""
    params = checks.parameters(dtype=parameter_type)
    oracle = Oracle(Settings(grad_scale=SCALE))
    optimizer = FusedLamb(params, lr=0.01, backend=backend)
    for grads in checks.gradients(3, dtype=gradient_type):
        before = [parameter.detach().clone() for parameter in params]
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad_dtype = None  # lets the gradient be of another type
            parameter.grad = gradient
        optimizer.step(grad_scale=SCALE)
        expected, _ = oracle.step(before, grads)
        for old, new, right in zip(before, params, expected, strict=True):
            step = (right - old.double()).abs().max()
            smallest = torch.finfo(parameter_type).smallest_normal
            rounding = UNIT[parameter_type] * right.abs().clamp(min=smallest)
            assert ((new.double() - right).abs() - rounding).max() <= STEP_TOLERANCE * step


@pytest.mark.parametrize("copy_type", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_copies_receive_the_new_values(copy_type: torch.dtype, backend: str) -> None:
    params = checks.parameters()
    optimizer = FusedLamb(params, backend=backend)
    copies = [torch.full_like(parameter, torch.nan, dtype=copy_type) for parameter in params]
    copies[2] = copies[2].to(memory_format=torch.channels_last)
    kept = [*copies[:3], None, copies[4]]
    for grads in checks.gradients(2):
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad = gradient
        optimizer.step(grad_scale=SCALE, copies=kept)
    for parameter, copy in zip(params, kept, strict=True):
        assert copy is None or torch.equal(copy, parameter.detach().to(copy_type))
    assert copies[3].isnan().all()


def test_groups_have_settings_of_their_own(backend: str) -> None:
    """Each of three groups moves as it does in an optimizer of its own."""
    settings = [
        {"lr": 0.1, "betas": (0.8, 0.99), "mode": "deepspeed", "eps": 1e-8},
        {"lr": 0.02, "weight_decay": 0.2, "weight_norm_clip": 1.0},
        {"mode": "apex", "weight_decay": 0.0, "max_coeff": 0.5},
    ]
    together = checks.parameters()
    groups = [{"params": together[i::3], **values} for i, values in enumerate(settings)]
    first = FusedLamb(groups, backend=backend)
    apart = checks.parameters()
    others = [FusedLamb(apart[i::3], backend=backend, **values) for i, values in enumerate(settings)]
    for grads in checks.gradients(4):
        for one, other, gradient in zip(together, apart, grads, strict=True):
            one.grad, other.grad = gradient, gradient
        first.step(grad_scale=SCALE)
        for optimizer in others:
            optimizer.step(grad_scale=SCALE)
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)


def test_the_clip_is_that_of_the_norm_of_all_gradients(backend: str) -> None:
    """The op clips as ``clip_grad_norm_`` does before an optimizer that does not clip."""
    clipped, reference = checks.parameters(), checks.parameters()
    first = FusedLamb(clipped, lr=0.05, max_grad_norm=checks.MAX_GRAD_NORM, backend=backend)
    second = FusedLamb(reference, lr=0.05, backend=backend)
    clips = 0
    for grads in checks.gradients(8):
        for one, other, gradient in zip(clipped, reference, grads, strict=True):
            one.grad, other.grad = gradient, gradient / SCALE
        first.step(grad_scale=SCALE)
        clips += bool(torch.nn.utils.clip_grad_norm_(reference, checks.MAX_GRAD_NORM) > checks.MAX_GRAD_NORM)
        second.step()
        for one, other, start in zip(clipped, reference, checks.parameters(), strict=True):
            moved_by = (other.detach() - start.detach()).abs().max()
            # clip_grad_norm_ takes the norm in fp32 and writes rounded gradients: some 1e-7 of each, over eight steps.
            assert (one - other).abs().max() <= 1e-5 * moved_by
    assert 0 < clips < 8
