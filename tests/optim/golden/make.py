"""Makes timm.json: a few steps of small layers as timm's own ``lamb.py`` computes them in float64.

    python -m tests.optim.golden.make FOLDER COMMIT

FOLDER holds a package of ``timm/optim/lamb.py`` and the modules beside it that it imports, taken from COMMIT. apex.json and
deepspeed.json hold the same steps by the formulas of those libraries' kernels, which need a GPU, written out in float64: by
this file as it was in commit 0ff451b of this repository. They are no outputs of the libraries.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"mode": "apex", "max_grad_norm": 1.0}),
    "no decay": ({"weight_decay": 0.0}, {"mode": "apex", "weight_decay": 0.0, "max_grad_norm": 1.0}),
    "always adapted": (
        {"weight_decay": 0.0, "always_adapt": True}, {"mode": "nvlamb", "weight_decay": 0.0, "max_grad_norm": 1.0},
    ),
    "not clipped": ({"max_grad_norm": None}, {"mode": "paper"}),
    "trust_clip": ({"trust_clip": True, "max_grad_norm": None}, {"mode": "paper", "max_coeff": 1.0}),
    "no averaging": (
        {"grad_averaging": False, "max_grad_norm": 0.5}, {"mode": "nvlamb", "grad_averaging": False, "max_grad_norm": 0.5},
    ),
    "no correction": ({"bias_correction": False, "max_grad_norm": None}, {"mode": "paper", "bias_correction": False}),
}  # fmt: skip
"""By name: arguments of timm's Lamb, and those of FusedLamb that must give the same."""


def main(folder: str, commit: str) -> None:
    """The inputs are those of apex.json: three of the four steps clip at 1, ratios are on both sides of 1."""
    here, path = Path(__file__).parent, Path(folder).resolve()
    data = json.loads((here / "apex.json").read_text(encoding="utf-8"))
    sys.path.insert(0, str(path.parent))
    lamb = importlib.import_module(f"{path.name}.lamb").Lamb
    data["source"] = (
        f"https://github.com/huggingface/pytorch-image-models, commit {commit}, timm/optim/lamb.py, class Lamb"
    )
    data["kind"] = f"output of that file, run in float64 with PyTorch {torch.__version__}"
    data["cases"] = []
    for name, (theirs, ours) in CASES.items():
        parameters = [
            torch.tensor(r, dtype=torch.float64).reshape(s)
            for r, s in zip(data["parameters"], data["shapes"], strict=True)
        ]
        optimizer, after = lamb(parameters, lr=0.05, **theirs), []
        for grads in data["gradients"]:
            for parameter, row in zip(parameters, grads, strict=True):
                parameter.grad = torch.tensor(row, dtype=torch.float64).reshape(parameter.shape)
            optimizer.step()
            after.append([parameter.reshape(-1).tolist() for parameter in parameters])
        data["cases"].append({"name": name, "arguments": {"lr": 0.05, **ours}, "grad_scale": 1.0, "after": after})
    lines = [f'"{key}": {json.dumps(value)},' for key, value in data.items() if key != "cases"]
    cases = ",\n".join(map(json.dumps, data["cases"]))
    (here / "timm.json").write_text("{\n" + "\n".join(lines) + f'\n"cases": [\n{cases}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
