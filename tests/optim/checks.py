"""The comparison of FusedLamb with the oracle, the same for the real tests and for those that must fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb

from .oracle import Oracle, Settings, Switches, ratio_error, step_error

SHAPES = ((24, 33), (257,), (3, 5, 2, 2), (1,), (40, 7))
GRADIENT_SIZES = (1e-2, 1e-2, 3e-3, 1e-2, 1e-6)
"""The last layer's gradients are of the size of eps, where it counts how eps is added."""
CHECKED_STEPS = (1, 2, 10, 200)
STEP_TOLERANCE = 2e-6
"""Some twenty roundings of 6e-8 each lie between a gradient and a step, most of them random."""
RATIO_TOLERANCE = 1e-6
SCALE = 1024.0
MAX_GRAD_NORM = 0.3
"""The norms of the gradients are between 0.03 and 3: some steps clip, others do not."""


PAPER = Switches()


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to construct FusedLamb, and the oracle's switches for it."""

    name: str
    arguments: Mapping[str, Any]
    switches: Switches = PAPER
    weight_decay: float = 0.01
    excluded: bool = False

    def settings(self) -> Settings:
        return Settings(weight_decay=self.weight_decay, max_grad_norm=MAX_GRAD_NORM, grad_scale=SCALE)


VARIANTS = (
    Variant("paper", {}),
    Variant("deepspeed", {"mode": "deepspeed"}, Switches(correction="step", min_coeff=0.01, max_coeff=10.0)),
    Variant(
        "deepspeed_tight",
        {"mode": "deepspeed", "min_coeff": 0.08, "max_coeff": 0.3},
        Switches(correction="step", min_coeff=0.08, max_coeff=0.3),
    ),
    Variant("nvlamb", {"mode": "nvlamb"}, weight_decay=0.0),
    Variant("apex", {"mode": "apex"}),
    Variant("apex_without_decay", {"mode": "apex"}, Switches(adapt="decayed"), weight_decay=0.0),
    Variant("excluded", {"exclude": "bias_norm"}, excluded=True),
    Variant("phi", {"weight_norm_clip": (0.1, 0.5)}, Switches(min_weight_norm=0.1, max_weight_norm=0.5)),
    Variant("eps_inside_sqrt", {"eps_inside_sqrt": True}, Switches(eps_inside_sqrt=True)),
    Variant("no_averaging", {"grad_averaging": False}, Switches(grad_averaging=False)),
    Variant("no_correction", {"bias_correction": False}, Switches(correction="none")),
)
BY_NAME = {variant.name: variant for variant in VARIANTS}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter((torch.randn(shape, generator=generator) * 0.05).to(dtype)) for shape in SHAPES]


def gradients(steps: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Iterator[list[Tensor]]:
    """Gradients with the loss scale in them; the norm of all of them changes from step to step by up to a hundred."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        size = 10 ** torch.empty(()).uniform_(-1, 1, generator=generator).item()
        yield [
            (torch.randn(shape, generator=generator) * (SCALE * size * typical)).to(dtype)
            for shape, typical in zip(SHAPES, GRADIENT_SIZES, strict=True)
        ]


def optimizer(variant: Variant, params: list[Parameter], backend: str, **changes: Any) -> FusedLamb:
    settings = variant.settings()
    arguments = {
        "lr": settings.lr,
        "weight_decay": variant.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "backend": backend,
        **variant.arguments,
        **changes,
    }
    return FusedLamb(params, **arguments)


def worst_errors(
    variant: Variant, backend: str, switches: Switches | None = None, steps: int = max(CHECKED_STEPS)
) -> tuple[float, float]:
    """Run the op, and the oracle beside it.

    Args:
        variant: what the op is.
        backend: which implementation of it.
        switches: the oracle's, by default the variant's own.
        steps: how many.

    Returns:
        The worst error of a parameter's step and of a trust ratio at the checked steps.
    """
    params = parameters()
    op = optimizer(variant, params, backend)
    excluded = [variant.excluded and parameter.dim() <= 1 for parameter in params]
    oracle = Oracle(variant.settings(), switches or variant.switches, excluded)
    step_worst = ratio_worst = 0.0
    for number, grads in enumerate(gradients(steps), start=1):
        before = [parameter.detach().clone() for parameter in params]
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad = gradient
        op.step(grad_scale=SCALE)
        expected, ratios = oracle.step(before, grads)
        if number in CHECKED_STEPS:
            errors = [step_error(*three) for three in zip(before, params, expected, strict=True)]
            step_worst = max(step_worst, *errors)
            got = [layer.trust_ratio for layer in op.statistics()]
            ratio_worst = max(ratio_worst, *(ratio_error(a, b) for a, b in zip(got, ratios, strict=True)))
    return step_worst, ratio_worst


def is_right(errors: tuple[float, float]) -> bool:
    """Whether the errors of :func:`worst_errors` are those of a right implementation."""
    return errors[0] <= STEP_TOLERANCE and errors[1] <= RATIO_TOLERANCE
