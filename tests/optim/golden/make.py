"""Makes the golden vectors: a few steps of small layers as other implementations of LAMB compute them, in float64.

    python -m tests.optim.golden.make                         apex.json and deepspeed.json
    python -m tests.optim.golden.make --timm FOLDER COMMIT    timm.json

``apex.json`` and ``deepspeed.json`` are NOT outputs of those libraries, whose kernels need a GPU: they come from the formulas
of their kernels, written out here in float64. ``timm.json`` is the output of timm's own ``lamb.py``, run in float64: FOLDER
holds a package of ``timm/optim/lamb.py`` and the modules beside it that it imports, taken from COMMIT.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = ((4, 3), (5,), (2, 2, 2))
Step = Callable[[list[Tensor], list[Tensor], int], None]


def inputs() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Parameters and the gradients of each step, float64 numbers that fp32 holds exactly.

    Three of the four steps clip at 1; the trust ratios are on both sides of 1.
    """
    generator = torch.Generator().manual_seed(0)

    def random(sizes: tuple[float, float, float]) -> list[Tensor]:
        return [(torch.randn(s, generator=generator), size) for s, size in zip(SHAPES, sizes, strict=True)]

    parameters = [tensor.double() * size for tensor, size in random((0.5, 4.0, 0.5))]
    return parameters, [[(t * size).double() for t, size in random((z, z, z))] for z in (1.0, 0.05, 2.0, 0.5)]


def norm(*tensors: Tensor) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def apex(
    lr: float, weight_decay: float = 0.01, bias_correction: bool = True, grad_averaging: bool = True,
    max_grad_norm: float = 1.0, use_nvlamb: bool = False,
) -> Step:  # fmt: skip
    """apex, csrc/multi_tensor_lamb.cu, LAMBStage1Functor with MOMENT_MODE_1 and LAMBStage2Functor."""
    moments = [(torch.zeros(shape).double(), torch.zeros(shape).double()) for shape in SHAPES]
    beta1, beta2, eps = 0.9, 0.999, 1e-6

    def step(parameters: list[Tensor], gradients: list[Tensor], t: int) -> None:
        total = norm(*gradients)
        divisor = total / max_grad_norm if total > max_grad_norm else 1.0
        beta3 = 1 - beta1 if grad_averaging else 1.0
        correction1 = 1 - beta1**t if bias_correction else 1.0
        correction2 = 1 - beta2**t if bias_correction else 1.0
        for p, g, (m, v) in zip(parameters, gradients, moments, strict=True):
            scaled = g / divisor
            m.copy_(m * beta1 + beta3 * scaled)
            v.copy_(v * beta2 + (1 - beta2) * scaled * scaled)
            update = (m / correction1) / ((v / correction2).sqrt() + eps) + weight_decay * p
            ratio = lr
            if use_nvlamb or weight_decay != 0:
                weight, change = norm(p), norm(update)
                ratio = lr * (weight / change) if weight != 0 and change != 0 else lr
            p.sub_(ratio * update)

    return step


def deepspeed(
    lr: float, eps: float, weight_decay: float, bias_correction: bool = True, eps_inside_sqrt: bool = False,
    max_coeff: float = 10.0, min_coeff: float = 0.01, clip: float = 0.0, scale: float = 1.0,
) -> Step:  # fmt: skip
    """DeepSpeed 0.19.8, csrc/lamb/fused_lamb_cuda_kernel.cu, with FP16_UnfusedOptimizer.unscale_and_clip_grads before it."""
    moments = [(torch.zeros(shape).double(), torch.zeros(shape).double()) for shape in SHAPES]
    beta1, beta2 = 0.9, 0.999

    def step(parameters: list[Tensor], gradients: list[Tensor], t: int) -> None:
        combined = scale
        if clip > 0:
            excess = (norm(*gradients) / scale + 1e-6) / clip
            combined = excess * scale if excess > 1 else scale
        size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) if bias_correction else lr
        for p, g, (m, v) in zip(parameters, gradients, moments, strict=True):
            scaled = g / combined
            m.copy_(beta1 * m + (1 - beta1) * scaled)
            v.copy_(beta2 * v + (1 - beta2) * scaled * scaled)
            update = m / ((v + eps).sqrt() if eps_inside_sqrt else v.sqrt() + eps) + weight_decay * p
            weight, change = norm(p), norm(update)
            coefficient = 1.0
            if weight != 0 and change != 0:
                coefficient = max(min(weight / change, max_coeff), min_coeff)
            p.sub_(size * coefficient * update)

    return step


def timm(lamb: Any, **arguments: Any) -> Step:
    made: list[Any] = []

    def step(parameters: list[Tensor], gradients: list[Tensor], t: int) -> None:
        if not made:
            made.append(lamb(parameters, **arguments))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        made[0].step()

    return step


def case(name: str, step: Step, arguments: dict[str, Any], scale: float = 1.0) -> dict[str, Any]:
    """Run ``step`` from the inputs; ``arguments`` are those of FusedLamb that must give the same."""
    parameters, gradients = inputs()
    after = []
    for t, grads in enumerate(gradients, start=1):
        step(parameters, [gradient * scale for gradient in grads], t)
        after.append([parameter.reshape(-1).tolist() for parameter in parameters])
    return {"name": name, "arguments": arguments, "grad_scale": scale, "after": after}


def apex_cases() -> list[dict[str, Any]]:
    found = []
    for mode in ("apex", "nvlamb"):
        for decay in (0.01, 0.0):
            step = apex(0.05, decay, use_nvlamb=mode == "nvlamb")
            arguments = {"mode": mode, "lr": 0.05, "weight_decay": decay, "max_grad_norm": 1.0}
            found.append(case(f"{mode}, decay {decay}", step, arguments))
    arguments = {"lr": 0.05, "grad_averaging": False, "bias_correction": False, "max_grad_norm": 0.5}
    return [*found, case("no averaging, no correction", apex(**arguments), {"mode": "apex", **arguments})]


def deepspeed_cases() -> list[dict[str, Any]]:
    base = {"lr": 0.05, "eps": 1e-6, "weight_decay": 0.01}
    decay = {**base, "weight_decay": 0.1}
    settings: dict[str, dict[str, Any]] = {
        "default": {"lr": 0.05, "eps": 1e-8, "weight_decay": 0.0},
        "decay": decay,
        "eps inside the root": {**base, "eps": 1e-3, "eps_inside_sqrt": True},
        "no correction": {**base, "bias_correction": False},
        "tight clamp": {**base, "min_coeff": 0.15, "max_coeff": 0.3},
    }
    found = [case(name, deepspeed(**values), {"mode": "deepspeed", **values}) for name, values in settings.items()]
    arguments = {"mode": "deepspeed", **decay, "max_grad_norm": 1.0}
    return [*found, case("clipped, loss scale 256", deepspeed(**decay, clip=1.0, scale=256.0), arguments, scale=256.0)]


def timm_cases(folder: Path) -> list[dict[str, Any]]:
    sys.path.insert(0, str(folder.parent))
    lamb, unclipped = importlib.import_module(f"{folder.name}.lamb").Lamb, {"max_grad_norm": None}
    no_decay, averaging = {"weight_decay": 0.0}, {"grad_averaging": False, "max_grad_norm": 0.5}
    settings: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "default": ({}, {"mode": "apex", "max_grad_norm": 1.0}),
        "no decay": (no_decay, {"mode": "apex", **no_decay, "max_grad_norm": 1.0}),
        "always adapted": ({**no_decay, "always_adapt": True}, {"mode": "nvlamb", **no_decay, "max_grad_norm": 1.0}),
        "not clipped": (unclipped, {"mode": "paper"}),
        "trust_clip": ({"trust_clip": True, **unclipped}, {"mode": "paper", "max_coeff": 1.0}),
        "no averaging": (averaging, {"mode": "nvlamb", **averaging}),
        "no correction": ({"bias_correction": False, **unclipped}, {"mode": "paper", "bias_correction": False}),
    }
    return [
        case(name, timm(lamb, lr=0.05, **theirs), {"lr": 0.05, **ours}) for name, (theirs, ours) in settings.items()
    ]


CASES = {"apex": apex_cases, "deepspeed": deepspeed_cases}


def write(name: str, source: str, kind: str, cases: list[dict[str, Any]]) -> None:
    parameters, gradients = inputs()
    rows = [[tensor.reshape(-1).tolist() for tensor in each] for each in (parameters, *gradients)]
    data = {"source": source, "kind": kind, "shapes": SHAPES, "parameters": rows[0], "gradients": rows[1:]}
    lines = [f'"{key}": {json.dumps(value)},' for key, value in data.items()]
    text = "{\n" + "\n".join(lines) + '\n"cases": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]}\n"
    (Path(__file__).parent / f"{name}.json").write_text(text, encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--timm"]:
        folder, commit = sys.argv[2:]
        source = f"https://github.com/huggingface/pytorch-image-models, commit {commit}, timm/optim/lamb.py, class Lamb"
        kind = f"output of that file, run in float64 with PyTorch {torch.__version__}"
        write("timm", source, kind, timm_cases(Path(folder).resolve()))
        return
    kind = "transcription: the kernel's formulas in float64, by make.py; not an output of the library"
    source = "https://github.com/NVIDIA/apex, csrc/multi_tensor_lamb.cu, optimizers/fused_lamb.py"
    write("apex", source, kind, apex_cases())
    write("deepspeed", "DeepSpeed 0.19.8, ops/csrc/lamb/fused_lamb_cuda_kernel.cu", kind, deepspeed_cases())


if __name__ == "__main__":
    main()
