"""Makes the golden vectors: a few steps of small layers as other implementations of LAMB compute them, in float64.

    python -m tests.optim.golden.make                         apex.json and deepspeed.json
    python -m tests.optim.golden.make --timm FOLDER COMMIT    timm.json

``apex.json`` and ``deepspeed.json`` are NOT outputs of those libraries, whose kernels need a GPU: they come from the formulas
of their kernels, written out here in float64. ``timm.json`` is the output of timm's own ``lamb.py``, run in float64: FOLDER
holds a package of ``timm/optim/lamb.py`` and the modules beside it that it imports, taken from COMMIT.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
SHAPES = ((4, 3), (5,), (2, 2, 2))
STEPS = 4
Case = dict[str, Any]
Step = Callable[[list[Tensor], list[Tensor], int], None]


def inputs() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Parameters and the gradients of each step, float64 numbers that fp32 holds exactly.

    Three of the four steps clip at 1; the trust ratios are on both sides of 1.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.randn(shape, generator=generator).double() * size
        for shape, size in zip(SHAPES, (0.5, 4.0, 0.5), strict=True)
    ]
    gradients = [
        [(torch.randn(shape, generator=generator) * size).double() for shape in SHAPES]
        for size in (1.0, 0.05, 2.0, 0.5)
    ]
    return parameters, gradients


class Moments:
    """m and v of every layer."""

    def __init__(self) -> None:
        self.m = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        self.v = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def apex(
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
) -> Step:
    """apex, csrc/multi_tensor_lamb.cu, LAMBStage1Functor with MOMENT_MODE_1 and LAMBStage2Functor."""
    state = Moments()

    def step(parameters: list[Tensor], gradients: list[Tensor], t: int) -> None:
        total = norm(gradients)
        divisor = total / max_grad_norm if total > max_grad_norm else 1.0
        beta1, beta2 = betas
        beta3 = 1 - beta1 if grad_averaging else 1.0
        correction1 = 1 - beta1**t if bias_correction else 1.0
        correction2 = 1 - beta2**t if bias_correction else 1.0
        for p, g, m, v in zip(parameters, gradients, state.m, state.v, strict=True):
            scaled = g / divisor
            m.copy_(m * beta1 + beta3 * scaled)
            v.copy_(v * beta2 + (1 - beta2) * scaled * scaled)
            update = (m / correction1) / ((v / correction2).sqrt() + eps) + weight_decay * p
            ratio = lr
            if use_nvlamb or weight_decay != 0:
                weight, change = norm([p]), norm([update])
                ratio = lr * (weight / change) if weight != 0 and change != 0 else lr
            p.sub_(ratio * update)

    return step


def deepspeed(
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    clip: float = 0.0,
    scale: float = 1.0,
) -> Step:
    """DeepSpeed 0.19.8, csrc/lamb/fused_lamb_cuda_kernel.cu, with FP16_UnfusedOptimizer.unscale_and_clip_grads before it."""
    state = Moments()

    def step(parameters: list[Tensor], gradients: list[Tensor], t: int) -> None:
        combined = scale
        if clip > 0:
            excess = (norm(gradients) / scale + 1e-6) / clip
            combined = excess * scale if excess > 1 else scale
        beta1, beta2 = betas
        size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if bias_correction else lr
        for p, g, m, v in zip(parameters, gradients, state.m, state.v, strict=True):
            scaled = g / combined
            m.copy_(beta1 * m + (1 - beta1) * scaled)
            v.copy_(beta2 * v + (1 - beta2) * scaled * scaled)
            root = (v + eps).sqrt() if eps_inside_sqrt else v.sqrt() + eps
            update = m / root + weight_decay * p
            weight, change = norm([p]), norm([update])
            coefficient = 1.0
            if weight != 0 and change != 0:
                coefficient = max(min(weight / change, max_coeff), min_coeff)
            p.sub_(size * coefficient * update)

    return step


def case(name: str, step: Step, arguments: dict[str, Any], scale: float = 1.0) -> Case:
    """Run ``step`` from the inputs.

    Args:
        name: of the case.
        step: updates the parameters in place from gradients and the number of the step.
        arguments: those of FusedLamb that must give the same.
        scale: the loss scale in the gradients.
    """
    parameters, gradients = inputs()
    after = []
    for t, grads in enumerate(gradients[:STEPS], start=1):
        step(parameters, [gradient * scale for gradient in grads], t)
        after.append([parameter.reshape(-1).tolist() for parameter in parameters])
    return {"name": name, "arguments": arguments, "grad_scale": scale, "after": after}


def apex_cases() -> list[Case]:
    found = []
    for nvlamb in (False, True):
        mode = "nvlamb" if nvlamb else "apex"
        for decay in (0.01, 0.0):
            step = apex(lr=0.05, weight_decay=decay, use_nvlamb=nvlamb)
            arguments = {"mode": mode, "lr": 0.05, "weight_decay": decay, "max_grad_norm": 1.0}
            found.append(case(f"{mode}, decay {decay}", step, arguments))
    step = apex(lr=0.05, grad_averaging=False, bias_correction=False, max_grad_norm=0.5)
    arguments = {"mode": "apex", "lr": 0.05, "grad_averaging": False, "bias_correction": False, "max_grad_norm": 0.5}
    return [*found, case("no averaging, no correction", step, arguments)]


def deepspeed_cases() -> list[Case]:
    settings: dict[str, dict[str, Any]] = {
        "default": {"lr": 0.05, "eps": 1e-8, "weight_decay": 0.0},
        "decay": {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.1},
        "eps inside the root": {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.01, "eps_inside_sqrt": True},
        "no correction": {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.01, "bias_correction": False},
        "tight clamp": {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.01, "min_coeff": 0.15, "max_coeff": 0.3},
    }
    found = [case(name, deepspeed(**values), {"mode": "deepspeed", **values}) for name, values in settings.items()]
    values = settings["decay"]
    step = deepspeed(**values, clip=1.0, scale=256.0)
    arguments = {"mode": "deepspeed", **values, "max_grad_norm": 1.0}
    return [*found, case("clipped, loss scale 256", step, arguments, scale=256.0)]


def timm_cases(folder: Path) -> list[Case]:
    sys.path.insert(0, str(folder.parent))
    lamb = importlib.import_module(f"{folder.name}.lamb").Lamb
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "default": ({}, {"mode": "apex", "max_grad_norm": 1.0}),
        "no decay": ({"weight_decay": 0.0}, {"mode": "apex", "weight_decay": 0.0, "max_grad_norm": 1.0}),
        "always adapted": (
            {"weight_decay": 0.0, "always_adapt": True},
            {"mode": "nvlamb", "weight_decay": 0.0, "max_grad_norm": 1.0},
        ),
        "not clipped": ({"max_grad_norm": None}, {"mode": "paper"}),
        "trust_clip": ({"trust_clip": True, "max_grad_norm": None}, {"mode": "paper", "max_coeff": 1.0}),
        "no averaging": (
            {"grad_averaging": False, "max_grad_norm": 0.5},
            {"mode": "nvlamb", "grad_averaging": False, "max_grad_norm": 0.5},
        ),
        "no correction": (
            {"bias_correction": False, "max_grad_norm": None},
            {"mode": "paper", "bias_correction": False},
        ),
    }
    return [
        case(name, timm_step(lamb, {"lr": 0.05, **theirs}), {"lr": 0.05, **ours})
        for name, (theirs, ours) in settings.items()
    ]


def timm_step(lamb: Any, arguments: dict[str, Any]) -> Step:
    made: list[Any] = []

    def step(parameters: list[Tensor], gradients: list[Tensor], t: int) -> None:
        if not made:
            made.append(lamb(parameters, **arguments))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        made[0].step()

    return step


def write(name: str, source: str, kind: str, cases: list[Case]) -> None:
    parameters, gradients = inputs()
    data = {
        "source": source,
        "kind": kind,
        "shapes": [list(shape) for shape in SHAPES],
        "parameters": [parameter.reshape(-1).tolist() for parameter in parameters],
        "gradients": [[gradient.reshape(-1).tolist() for gradient in grads] for grads in gradients],
        "cases": cases,
    }
    (HERE / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", nargs=2, metavar=("FOLDER", "COMMIT"))
    timm = parser.parse_args().timm
    if timm:
        source = (
            f"https://github.com/huggingface/pytorch-image-models, commit {timm[1]}, timm/optim/lamb.py, class Lamb"
        )
        kind = f"output of that file, run in float64 with PyTorch {torch.__version__}"
        write("timm", source, kind, timm_cases(Path(timm[0]).resolve()))
        return
    kind = "transcription: the kernel's formulas in float64, by make.py; not an output of the library"
    write(
        "apex",
        "https://github.com/NVIDIA/apex, csrc/multi_tensor_lamb.cu, optimizers/fused_lamb.py",
        kind,
        apex_cases(),
    )
    write("deepspeed", "DeepSpeed 0.19.8, ops/csrc/lamb/fused_lamb_cuda_kernel.cu", kind, deepspeed_cases())


if __name__ == "__main__":
    main()
