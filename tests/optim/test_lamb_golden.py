"""The modes give what the implementations that they are named after give; golden/make.py says where the numbers come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb

from .oracle import STEP_TOLERANCE

FILES = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "golden").glob("*.json"))}
CASES = {(name, case["name"]): case for name, data in FILES.items() for case in data["cases"]}


def worst(name: str, case: str, backend: str, **changes: Any) -> float:
    """The largest error over all steps, as a share of what so many steps may be wrong by.

    A step may be wrong by what a single one may against the oracle, and by the rounding of a stored parameter.
    """
    data, golden = FILES[name], CASES[name, case]

    def tensors(rows: list[list[float]]) -> list[Tensor]:
        return [torch.tensor(r, dtype=torch.float64).reshape(s) for r, s in zip(rows, data["shapes"], strict=True)]

    old = tensors(data["parameters"])
    params = [Parameter(tensor.float()) for tensor in old]
    optimizer = FusedLamb(params, backend=backend, **{**golden["arguments"], **changes})
    allowed, share = [torch.zeros(()).double() for _ in params], 0.0
    for grads, after in zip(data["gradients"], golden["after"], strict=True):
        for parameter, gradient in zip(params, tensors(grads), strict=True):
            parameter.grad = gradient.float() * golden["grad_scale"]
        optimizer.step(grad_scale=golden["grad_scale"])
        new = tensors(after)
        for i, parameter in enumerate(params):
            allowed[i] = allowed[i] + STEP_TOLERANCE * (new[i] - old[i]).abs().max() + 6e-8 * new[i].abs().max()
            share = max(share, ((parameter.detach().double() - new[i]).abs().max() / allowed[i]).item())
        old = new
    return share


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_mode_is_what_it_is_named_after(name: str, case: str, backend: str) -> None:
    assert worst(name, case, backend) <= 1


@pytest.mark.parametrize(
    ("name", "case", "changes"),
    [
        ("apex", "apex, decay 0.01", {"mode": "deepspeed"}), ("apex", "apex, decay 0.0", {"mode": "nvlamb"}),
        ("apex", "nvlamb, decay 0.0", {"mode": "apex"}), ("apex", "nvlamb, decay 0.01", {"max_grad_norm": None}),
        ("deepspeed", "decay", {"mode": "paper"}), ("deepspeed", "tight clamp", {"max_coeff": 10.0}),
        ("deepspeed", "clipped, loss scale 256", {"max_grad_norm": None}), ("timm", "default", {"max_grad_norm": None}),
        ("timm", "no decay", {"mode": "paper"}), ("timm", "always adapted", {"mode": "apex"}),
        ("timm", "trust_clip", {"max_coeff": None}),
    ],
)  # fmt: skip
def test_the_vectors_tell_the_modes_apart(name: str, case: str, changes: dict[str, Any]) -> None:
    assert worst(name, case, "auto", **changes) > 100


def test_every_source_says_what_it_is() -> None:
    kinds = {name: data["kind"].split()[0] for name, data in FILES.items()}
    assert kinds == {"apex": "transcription:", "deepspeed": "transcription:", "timm": "output"}
    assert all("not an output" in FILES[name]["kind"] for name in ("apex", "deepspeed"))
