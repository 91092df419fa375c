"""The modes give what the implementations that they are named after give; golden/make.py says where the numbers come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb
from tests.optim.checks import STEP_TOLERANCE
from tests.optim.golden import make

FOLDER = Path(__file__).parent / "golden"
FILES = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
CASES = [(name, case["name"]) for name, data in FILES.items() for case in data["cases"]]


def tensors(data: dict[str, Any], rows: list[list[float]]) -> list[torch.Tensor]:
    return [
        torch.tensor(row, dtype=torch.float64).reshape(shape) for row, shape in zip(rows, data["shapes"], strict=True)
    ]


def worst(data: dict[str, Any], case: dict[str, Any], backend: str, **changes: Any) -> float:
    """The largest error over all steps, as a share of what so many steps may be wrong by.

    A step may be wrong by what a single one may against the oracle, and by the rounding of a stored parameter.
    """
    params = [Parameter(tensor.float()) for tensor in tensors(data, data["parameters"])]
    optimizer = FusedLamb(params, backend=backend, **{**case["arguments"], **changes})
    allowed = [torch.zeros(()).double() for _ in params]
    share = 0.0
    old = tensors(data, data["parameters"])
    for grads, after in zip(data["gradients"], case["after"], strict=True):
        for parameter, gradient in zip(params, tensors(data, grads), strict=True):
            parameter.grad = gradient.float() * case["grad_scale"]
        optimizer.step(grad_scale=case["grad_scale"])
        new = tensors(data, after)
        for i, parameter in enumerate(params):
            allowed[i] = allowed[i] + STEP_TOLERANCE * (new[i] - old[i]).abs().max() + 6e-8 * new[i].abs().max()
            share = max(share, ((parameter.detach().double() - new[i]).abs().max() / allowed[i]).item())
        old = new
    return share


def find(name: str, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    data = FILES[name]
    return data, next(found for found in data["cases"] if found["name"] == case)


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_mode_is_what_it_is_named_after(name: str, case: str, backend: str) -> None:
    assert worst(*find(name, case), backend) <= 1


@pytest.mark.parametrize(
    ("name", "case", "changes"),
    [
        ("apex", "apex, decay 0.01", {"mode": "deepspeed"}),
        ("apex", "apex, decay 0.0", {"mode": "nvlamb"}),
        ("apex", "nvlamb, decay 0.0", {"mode": "apex"}),
        ("apex", "nvlamb, decay 0.01", {"max_grad_norm": None}),
        ("deepspeed", "decay", {"mode": "paper"}),
        ("deepspeed", "tight clamp", {"max_coeff": 10.0}),
        ("deepspeed", "clipped, loss scale 256", {"max_grad_norm": None}),
        ("timm", "default", {"max_grad_norm": None}),
        ("timm", "no decay", {"mode": "paper"}),
        ("timm", "always adapted", {"mode": "apex"}),
        ("timm", "trust_clip", {"max_coeff": None}),
    ],
)
def test_another_mode_is_not(name: str, case: str, changes: dict[str, Any]) -> None:
    """The vectors tell the modes apart, and clipping from none."""
    assert worst(*find(name, case), "auto", **changes) > 100


def test_every_source_is_there_and_says_what_it_is() -> None:
    assert set(FILES) == {"apex", "deepspeed", "timm"}
    assert FILES["timm"]["kind"].startswith("output of that file")
    for name in ("apex", "deepspeed"):
        assert FILES[name]["kind"].startswith("transcription") and "not an output" in FILES[name]["kind"]


@pytest.mark.parametrize(("name", "cases"), [("apex", make.apex_cases), ("deepspeed", make.deepspeed_cases)])
def test_the_transcriptions_are_what_is_stored(name: str, cases: Any) -> None:
    """So that a change of make.py cannot go unnoticed; sums may round in another order on another machine."""
    for stored, made in zip(FILES[name]["cases"], cases(), strict=True):
        assert stored["name"] == made["name"] and stored["arguments"] == made["arguments"]
        assert stored["after"] == [[pytest.approx(row, rel=1e-12) for row in step] for step in made["after"]]
