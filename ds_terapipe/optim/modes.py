"""The named variants of LAMB, and the settings of a parameter group as one row of the rules.

Sources of the variants: You et al., arXiv 1904.00962 v5, algorithm 2 (``paper``); DeepSpeed 0.19.8,
``ops/csrc/lamb/fused_lamb_cuda_kernel.cu`` (``deepspeed``); NVIDIA apex, ``optimizers/fused_lamb.py`` with and without
``use_nvlamb`` (``nvlamb``, ``apex``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from torch import Tensor

from ds_terapipe.blocks import NotNegative, Switch, Whole
from ds_terapipe.errors import bad_value, is_finite

# Flags of a rule; csrc/lamb/segment.h has the same numbers.
ADAPT, CORRECT_MOMENTS, CORRECT_STEP, EPS_INSIDE_SQRT = 1, 2, 4, 8


class Rule(NamedTuple):
    """Settings of a segment and the number of its step: columns of ``Rule`` in csrc/lamb/segment.h."""

    lr: float
    beta1: float
    beta2: float
    beta3: float
    eps: float
    weight_decay: float
    step: float
    min_coeff: float
    max_coeff: float
    min_weight_norm: float
    max_weight_norm: float
    flags: float

    def has(self, flag: int) -> bool:
        return bool(int(self.flags) & flag)


STEP, LR = Rule._fields.index("step"), Rule._fields.index("lr")


@dataclass(frozen=True)
class Mode:
    """Switches of a named variant.

    Attributes:
        correction: the flag of the place where the bias correction is made.
        adapts_without_decay: whether tensors of a group without weight decay are multiplied by the trust ratio.
        min_coeff: lower end of the trust ratio's clamp.
        max_coeff: its upper end.
    """

    correction: int
    adapts_without_decay: bool = True
    min_coeff: float = 0.0
    max_coeff: float = math.inf


MODES: Mapping[str, Mode] = {
    "paper": Mode(CORRECT_MOMENTS),
    "deepspeed": Mode(CORRECT_STEP, min_coeff=0.01, max_coeff=10.0),
    "nvlamb": Mode(CORRECT_MOMENTS),
    "apex": Mode(CORRECT_MOMENTS, adapts_without_decay=False),
}
BACKENDS = ("auto", "cpu", "cuda", "plain")


def key(name: str) -> str:
    """Full path of a setting in ``ds_config.json``, for messages."""
    return f"optimizer.params.{name}"


class Setting(NamedTuple):
    """Type of a setting, as pydantic reads it, and the words of an error, to follow "must be" and "use"."""

    kind: Any
    must: str
    use: str


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError
    return pair


_real = BeforeValidator(lambda value: float(value) if is_finite(value) else value)  # NumPy's too
Size = Annotated[NotNegative, _real]
UpperEnd = Annotated[float, Field(strict=True, gt=0), _real]  # or infinity
Beta = Annotated[float, Field(strict=True, ge=0, lt=1), _real]
_FINITE = "a finite number, 0 or more"
_FLAG = Setting(Switch, "true or false", "true or false")

SETTINGS: Mapping[str, Setting] = {
    "lr": Setting(Size, _FINITE, "e.g. 1e-3"),
    "betas": Setting(tuple[Beta, Beta], "two numbers from 0 to below 1", "e.g. [0.9, 0.999]"),
    "eps": Setting(Size, _FINITE, "e.g. 1e-6"),
    "weight_decay": Setting(Size, _FINITE, "e.g. 0.01"),
    "mode": Setting(Literal[tuple(MODES)], f"one of {', '.join(MODES)}", '"paper" for the published algorithm'),
    "exclude": Setting(Literal["bias_norm"] | None, 'null or "bias_norm"', "null to adapt every tensor"),
    "max_grad_norm": Setting(Size | None, f"{_FINITE} (0 does not clip)", "e.g. 1.0"),
    "min_coeff": Setting(Size | None, _FINITE, "e.g. 0.01"),
    "max_coeff": Setting(UpperEnd | None, "a number above 0", "e.g. 10.0"),
    "weight_norm_clip": Setting(
        Annotated[tuple[Size, UpperEnd], AfterValidator(_ordered)] | UpperEnd | None,
        "null, an upper bound above 0, or [lower, upper]",
        "e.g. 10.0 or [0.0, 10.0]",
    ),
    **dict.fromkeys(("bias_correction", "eps_inside_sqrt", "grad_averaging", "split_qkv", "check_gradients"), _FLAG),
    "monitor_interval": Setting(Whole, "a number of steps, 0 or more", "0 for never"),
    "backend": Setting(Literal[BACKENDS], f"one of {', '.join(BACKENDS)}", '"auto"'),
}


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(SETTINGS[name].kind)


def checked(name: str, value: Any) -> Any:
    """Return the value of a setting as its type has it.

    Raises:
        ConfigError: naming the setting as ``optimizer.params.<name>``.
    """
    try:
        return _adapter(name).validate_python(value)
    except ValidationError:
        raise bad_value(key(name), value, SETTINGS[name].must, SETTINGS[name].use) from None


def settings_of(group: Mapping[str, Any]) -> list[Any]:
    """Return a parameter group's settings but for its lr, which schedules change."""
    return [group[name] for name in SETTINGS if name in group and name != "lr"]


def resolve(group: dict[str, Any]) -> None:
    """Check a parameter group's settings, and replace None by the mode's values. In place.

    Raises:
        ConfigError: naming the setting as ``optimizer.params.<name>``.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise bad_value(key("lr"), list(lr.shape), "a number or a tensor of one element", "e.g. 1e-3")
    of_group = {
        name: group[name] for name in SETTINGS if name in group and not (name == "lr" and isinstance(lr, Tensor))
    }
    group.update({name: checked(name, value) for name, value in of_group.items()})
    mode, clip = MODES[group["mode"]], group["weight_norm_clip"]
    for name in ("min_coeff", "max_coeff"):
        if group[name] is None:
            group[name] = getattr(mode, name)
    if group["min_coeff"] > group["max_coeff"]:
        rule = f"at most max_coeff, {group['max_coeff']}"
        raise bad_value(key("min_coeff"), group["min_coeff"], rule, "a smaller min_coeff or a larger max_coeff")
    if not isinstance(clip, tuple):
        group["weight_norm_clip"] = 0.0, math.inf if clip is None else clip


def is_excluded(group: Mapping[str, Any], dimensions: int) -> bool:
    """Whether a parameter of that many dimensions gets neither decay nor the trust ratio in this group."""
    return group["exclude"] == "bias_norm" and dimensions <= 1


def rule(group: Mapping[str, Any], excluded: bool, lr: float = 0.0, step: float = 0.0) -> Rule:
    """The group's settings as a row of the rules."""
    mode = MODES[group["mode"]]
    (beta1, beta2), (low, high) = group["betas"], group["weight_norm_clip"]
    decay = 0.0 if excluded else float(group["weight_decay"])
    adapts = not excluded and (mode.adapts_without_decay or decay != 0)
    flags = ADAPT * adapts + EPS_INSIDE_SQRT * group["eps_inside_sqrt"]
    if group["bias_correction"]:
        flags += mode.correction
    return Rule(
        lr, beta1, beta2, 1.0 - beta1 if group["grad_averaging"] else 1.0, float(group["eps"]), decay, step,
        group["min_coeff"], group["max_coeff"], low, high, float(flags),
    )  # fmt: skip
