"""The named variants of LAMB, and the settings of a parameter group as one row of the rules.

Sources of the variants: You et al., arXiv 1904.00962 v5, algorithm 2 (``paper``); DeepSpeed 0.19.8,
``ops/csrc/lamb/fused_lamb_cuda_kernel.cu`` (``deepspeed``); NVIDIA apex, ``optimizers/fused_lamb.py`` with and without
``use_nvlamb`` (``nvlamb``, ``apex``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

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
EXCLUDES = (None, "bias_norm")


def key(name: str) -> str:
    """Full path of a setting in ``ds_config.json``, for messages."""
    return f"optimizer.params.{name}"


def resolve(group: dict[str, Any]) -> None:
    """Check a parameter group's settings, and replace None by the mode's values. In place.

    Raises:
        ConfigError: naming the setting as ``optimizer.params.<name>``.
    """
    mode = group["mode"]
    if not isinstance(mode, str) or mode not in MODES:
        raise bad_value(key("mode"), mode, f"one of {', '.join(MODES)}", '"paper" for the published algorithm')
    if group["exclude"] not in EXCLUDES:
        raise bad_value(key("exclude"), group["exclude"], 'null or "bias_norm"', "null to adapt every tensor")
    for name in ("bias_correction", "eps_inside_sqrt", "grad_averaging", "split_qkv"):
        flag(name, group[name])
    if not isinstance(group["lr"], Tensor):
        number("lr", group["lr"], "1e-3")
    elif group["lr"].numel() != 1:
        raise bad_value(key("lr"), list(group["lr"].shape), "a number or a tensor of one element", "e.g. 1e-3")
    number("eps", group["eps"], "1e-6")
    number("weight_decay", group["weight_decay"], "0.01")
    group["betas"] = _betas(group["betas"])
    group["min_coeff"], group["max_coeff"] = _coefficients(group, MODES[mode])
    group["weight_norm_clip"] = _weight_norm_clip(group["weight_norm_clip"])


def flag(name: str, value: Any) -> bool:
    """``value``, if it is true or false."""
    if not isinstance(value, bool):
        raise bad_value(key(name), value, "true or false", "true or false")
    return value


def number(name: str, value: Any, example: str, positive: bool = False) -> float:
    """``value`` as a float, if it is a finite number that is not negative (or, with ``positive``, above zero)."""
    if not is_finite(value) or value < 0 or (positive and value == 0):
        rule = "a finite number above 0" if positive else "a finite number, 0 or more"
        raise bad_value(key(name), value, rule, f"e.g. {example}")
    return float(value)


def _betas(betas: Any) -> tuple[float, float]:
    good = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not good or not all(isinstance(b, (int, float)) and not isinstance(b, bool) and 0 <= b < 1 for b in betas):
        raise bad_value(key("betas"), betas, "two numbers from 0 to below 1", "e.g. [0.9, 0.999]")
    return float(betas[0]), float(betas[1])


def _coefficients(group: Mapping[str, Any], mode: Mode) -> tuple[float, float]:
    low = mode.min_coeff if group["min_coeff"] is None else number("min_coeff", group["min_coeff"], "0.01")
    high = group["max_coeff"]
    if high is None:
        high = mode.max_coeff
    elif high != math.inf:
        high = number("max_coeff", high, "10.0", positive=True)
    if low > high:
        raise bad_value(
            key("min_coeff"), low, f"at most max_coeff, {high}", "a smaller min_coeff or a larger max_coeff"
        )
    return float(low), float(high)


def _weight_norm_clip(clip: Any) -> tuple[float, float]:
    """The range that the weight norm is clamped to: None, an upper end, or (lower, upper)."""
    if clip is None:
        return 0.0, math.inf
    pair = (0.0, clip) if isinstance(clip, (int, float)) and not isinstance(clip, bool) else clip
    good = isinstance(pair, (tuple, list)) and len(pair) == 2
    good = good and is_finite(pair[0]) and (is_finite(pair[1]) or pair[1] == math.inf)
    if not good or not (0 <= pair[0] <= pair[1] and pair[1] > 0):
        raise bad_value(
            key("weight_norm_clip"), clip, "null, an upper bound above 0, or [lower, upper]", "e.g. 10.0 or [0.0, 10.0]"
        )
    return float(pair[0]), float(pair[1])


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
