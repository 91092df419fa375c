"""FusedLamb against the float64 oracle, golden values of other implementations, and what must hold exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ds_terapipe.optim.lamb import FusedLamb

from . import oracle
from .oracle import MAX_GRAD_NORM, RATIO_TOLERANCE, SCALE, STEP_TOLERANCE, Oracle, Switches, gradients, parameters

UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half the distance of neighbours, relative to a number of the type."""
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
STEP, TIGHT = Switches(correction="step", min_coeff=0.01, max_coeff=10.0), {"min_coeff": 0.08, "max_coeff": 0.3}


class Variant(NamedTuple):
    """A way to construct FusedLamb, and the oracle for it."""

    arguments: dict[str, Any]
    switches: Switches = Switches()
    decay: float = oracle.DECAY


VARIANTS = {
    "paper": Variant({}),
    "deepspeed": Variant({"mode": "deepspeed"}, STEP),
    "deepspeed tight": Variant({"mode": "deepspeed", **TIGHT}, Switches("step", **TIGHT)),
    "nvlamb": Variant({"mode": "nvlamb"}, decay=0.0),
    "apex": Variant({"mode": "apex"}),
    "apex without decay": Variant({"mode": "apex"}, Switches(adapt="decayed"), 0.0),
    "excluded": Variant({"exclude": "bias_norm"}),
    "phi": Variant({"weight_norm_clip": (0.1, 0.5)}, Switches(min_weight_norm=0.1, max_weight_norm=0.5)),
    "eps inside": Variant({"eps_inside_sqrt": True}, Switches(eps_inside_sqrt=True)),
    "no averaging": Variant({"grad_averaging": False}, Switches(grad_averaging=False)),
    "no correction": Variant({"bias_correction": False}, Switches(correction="none")),
}


def worst_errors(variant: Variant, backend: str, steps: int) -> tuple[float, float]:
    """Run the op, and the oracle beside it: the worst error of a parameter's step and of a ratio, in tolerances."""
    params = parameters()
    op = FusedLamb(
        params, oracle.LR, weight_decay=variant.decay, max_grad_norm=MAX_GRAD_NORM, backend=backend, **variant.arguments
    )
    excluded = ["exclude" in variant.arguments and parameter.dim() <= 1 for parameter in params]
    right = Oracle(variant.switches, variant.decay, MAX_GRAD_NORM, SCALE, excluded)
    worst = [0.0], [0.0]
    for number, grads in enumerate(gradients(steps), start=1):
        before = [parameter.detach().clone() for parameter in params]
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad = gradient
        op.step(grad_scale=SCALE)
        expected, ratios = right.step(before, grads)
        if number in (1, 2, 10, 200):
            worst[0].extend(
                oracle.step_error(*three) / STEP_TOLERANCE for three in zip(before, params, expected, strict=True)
            )
            got = [layer.trust_ratio for layer in op.statistics()]
            worst[1].extend(oracle.ratio_error(a, b) / RATIO_TOLERANCE for a, b in zip(got, ratios, strict=True))
    return max(worst[0]), max(worst[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_oracles(name: str, backend: str) -> None:
    steps = 200 if name in ("paper", "deepspeed") else 10
    assert max(worst_errors(VARIANTS[name], backend, steps)) <= 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("paper", {"clip": "off"}), ("paper", {"clip": "scaled"}), ("paper", {"correction": "step"}),
        ("paper", {"correction": "none"}), ("deepspeed", {"correction": "moments"}), ("deepspeed", {"correction": "none"}),
        ("paper", {"eps_inside_sqrt": True}), ("eps inside", {"eps_inside_sqrt": False}), ("paper", {"decay_in_norm": False}),
        ("paper", {"norm": 1}), ("paper", {"grad_averaging": False}), ("no averaging", {"grad_averaging": True}),
        ("deepspeed tight", {"max_coeff": math.inf}), ("deepspeed tight", {"min_coeff": 0.0}),
        ("deepspeed tight", {"clamps_weight": True}), ("phi", {"min_weight_norm": 0.0, "max_weight_norm": math.inf}),
        ("phi", {"min_coeff": 0.1, "max_coeff": 0.5, "min_weight_norm": 0.0, "max_weight_norm": math.inf}),
        ("paper", {"step_offset": -1}), ("paper", {"step_offset": 1}), ("deepspeed", {"step_offset": 1}),
        ("paper", {"norm_share": 0.5}), ("apex without decay", {"adapt": "all"}), ("nvlamb", {"adapt": "decayed"}),
        ("paper", {"adapt": "none"}),
    ],
    ids=str,
)  # fmt: skip
def test_the_comparison_tells_implementations_apart(name: str, changes: dict[str, Any]) -> None:
    """An oracle that is wrong in one place disagrees: so would a wrong op with the right one."""
    variant = VARIANTS[name]
    wrong = variant._replace(switches=variant.switches._replace(**changes))
    assert max(worst_errors(wrong, "auto", 10)) > 1


@pytest.mark.parametrize(
    ("parameter_type", "gradient_type"), [(FP16, FP32), (FP16, FP16), (BF16, FP16), (BF16, BF16), (FP16, BF16)], ids=str
)
def test_sixteen_bit_parameters(parameter_type: torch.dtype, gradient_type: torch.dtype, backend: str) -> None:
    """The step is the oracle's from the stored parameter, and rounded to nearest once."""
    params = parameters(parameter_type)
    right, optimizer = Oracle(scale=SCALE), FusedLamb(params, lr=oracle.LR, backend=backend)
    for grads in gradients(3, gradient_type):
        before = [parameter.detach().clone() for parameter in params]
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad_dtype = None  # lets the gradient be of another type
            parameter.grad = gradient
        optimizer.step(grad_scale=SCALE)
        for old, new, want in zip(before, params, right.step(before, grads)[0], strict=True):
            step = (want - old.double()).abs().max()
            rounding = UNIT[parameter_type] * want.abs().clamp(min=torch.finfo(parameter_type).smallest_normal)
            assert ((new.double() - want).abs() - rounding).max() <= STEP_TOLERANCE * step


@pytest.mark.parametrize("copy_type", [FP32, FP16, BF16], ids=str)
def test_copies_receive_the_new_values(copy_type: torch.dtype, backend: str) -> None:
    params = parameters()
    optimizer = FusedLamb(params, backend=backend)
    copies = [torch.full_like(parameter, torch.nan, dtype=copy_type) for parameter in params]
    copies[2] = copies[2].to(memory_format=torch.channels_last)
    kept = [*copies[:3], None, copies[4]]
    for grads in gradients(2):
        for parameter, gradient in zip(params, grads, strict=True):
            parameter.grad = gradient
        optimizer.step(grad_scale=SCALE, copies=kept)
    for parameter, copy in zip(params, kept, strict=True):
        assert copy is None or torch.equal(copy, parameter.detach().to(copy_type))
    assert copies[3].isnan().all()


def test_groups_have_settings_of_their_own(backend: str) -> None:
    """Each of three groups moves as it does in an optimizer of its own; the last is added after two steps."""
    settings: list[dict[str, Any]] = [
        {"lr": 0.1, "betas": (0.8, 0.99), "mode": "deepspeed", "eps": 1e-8},
        {"lr": 0.02, "weight_decay": 0.2, "weight_norm_clip": 1.0},
        {"mode": "apex", "weight_decay": 0.0, "max_coeff": 0.5},
    ]
    together, apart = parameters(), parameters()
    groups = [{"params": together[i::3], **values} for i, values in enumerate(settings)]
    first = FusedLamb(groups[:2], backend=backend)
    others = [FusedLamb(apart[i::3], backend=backend, **values) for i, values in enumerate(settings)]
    for number, grads in enumerate(gradients(4)):
        for one, other, gradient in zip(together, apart, grads, strict=True):
            one.grad, other.grad = gradient, gradient
        if number == 2:
            first.add_param_group(groups[2])
        first.step(grad_scale=SCALE)
        for optimizer in others[: 2 + (number > 1)]:
            optimizer.step(grad_scale=SCALE)
    assert all(map(torch.equal, together, apart))


def test_the_clip_is_that_of_the_norm_of_all_gradients(backend: str) -> None:
    """The op clips as ``clip_grad_norm_`` does before an optimizer that does not clip."""
    clipped, reference = parameters(), parameters()
    first = FusedLamb(clipped, lr=0.05, max_grad_norm=MAX_GRAD_NORM, backend=backend)
    second = FusedLamb(reference, lr=0.05, backend=backend)
    clips = 0
    for grads in gradients(8):
        for one, other, gradient in zip(clipped, reference, grads, strict=True):
            one.grad, other.grad = gradient, gradient / SCALE
        first.step(grad_scale=SCALE)
        clips += bool(torch.nn.utils.clip_grad_norm_(reference, MAX_GRAD_NORM) > MAX_GRAD_NORM)
        second.step()
        for one, other, start in zip(clipped, reference, parameters(), strict=True):
            # clip_grad_norm_ takes the norm in fp32 and writes rounded gradients: some 1e-7 of each, over eight steps.
            assert (one - other).abs().max() <= 1e-5 * (other.detach() - start.detach()).abs().max()
    assert 0 < clips < 8


# --------------------------------------------------------------------- what others give; golden/make.py says where it is from

FILES = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "golden").glob("*.json"))}
CASES = {(name, case["name"]): case for name, data in FILES.items() for case in data["cases"]}


def golden_error(name: str, case: str, backend: str, **changes: Any) -> float:
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
    assert golden_error(name, case, backend) <= 1


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
    assert golden_error(name, case, "auto", **changes) > 100


def test_every_source_says_what_it_is() -> None:
    kinds = {name: data["kind"].split()[0] for name, data in FILES.items()}
    assert kinds == {"apex": "transcription:", "deepspeed": "transcription:", "timm": "output"}
    assert all("not an output" in FILES[name]["kind"] for name in ("apex", "deepspeed"))
