"""The optimizer's state as other LAMBs read and write it.

Ours carries the number of steps in every parameter's state, as DeepSpeed's FusedLamb wants it, and in the group, as apex's
and timm's do, and the settings that those expect in a group. Read: DeepSpeed 0.19.8 ``ops/lamb/fused_lamb.py``, apex
``optimizers/fused_lamb.py``, timm ``optim/lamb.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_terapipe.errors import ConfigError

# Keys of timm's groups that ours lack, at the values of our algorithm; written, never read.
_OTHERS = {
    "trust_clip": False,
    "always_adapt": True,
    "caution": False,
    "decoupled_decay": False,
    "corrected_weight_decay": False,
    "max_lr_snapshot": None,
    "foreach": None,
}
# DeepSpeed refuses to step with a value above 0, so that the value stays with the constructor.
_UNCLIPPED = {"max_grad_norm": 0.0}
_SHARED = ("lr", "betas", "eps", "weight_decay", "bias_correction", "initial_lr")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def exported(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A ``state_dict`` of PyTorch's form with the steps as int, where each of the others looks for them. May wait for a GPU."""
    counts = {id(values["step"]): values["step"] for values in state_dict["state"].values() if "step" in values}
    numbers = {key: int(step) for key, step in counts.items()}  # parameters share counts on a device: one read for each
    state = {
        index: {key: numbers[id(value)] if key == "step" else value for key, value in values.items()}
        for index, values in state_dict["state"].items()
        if values  # a parameter that was never stepped, a frozen one, has none
    }
    groups = []
    for group in state_dict["param_groups"]:
        steps = [state[index]["step"] for index in group["params"] if "step" in state.get(index, {})]
        groups.append({**_OTHERS, **_UNCLIPPED, **group, "step": max(steps, default=0)})
    return {**state_dict, "state": state, "param_groups": groups}


def imported(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A state of ours, DeepSpeed's FusedLamb, apex's FusedLAMB or timm's Lamb in the form that ours has.

    Args:
        state_dict: as saved.
        groups: the ``param_groups`` that it is for. From a foreign state they take lr, betas, eps, weight_decay and
            bias_correction; all else stays as it is there.

    Raises:
        ConfigError: if groups, numbers or shapes of parameters are others. Nothing has been changed then.
    """
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        raise ConfigError(
            f"optimizer: got a state of {[len(group['params']) for group in saved]} parameters per group, must be that of "
            f"{[len(group['params']) for group in groups]}, use a checkpoint of the same model and parameter groups"
        )
    state = {index: dict(values) for index, values in state_dict["state"].items() if values}
    for old, group in zip(saved, groups, strict=True):
        for index, parameter in zip(old["params"], group["params"], strict=True):
            if index in state:
                state[index] = _state(state[index], old.get("step", 0), parameter)
    return {"state": state, "param_groups": [_group(old, new) for old, new in zip(saved, groups, strict=True)]}


def _state(values: dict[str, Any], group_step: Any, parameter: Tensor) -> dict[str, Any]:
    for name in _MOMENTS:
        moment = values.get(name)
        if not isinstance(moment, Tensor) or moment.shape != parameter.shape:
            got = tuple(moment.shape) if isinstance(moment, Tensor) else moment
            raise ConfigError(
                f"optimizer: got {name} of shape {got}, must be that of its parameter, {tuple(parameter.shape)}, use a "
                "checkpoint of the same model"
            )
    step = int(values.get("step", group_step))
    if step < 0:
        raise ConfigError(f"optimizer: got step {step}, must be 0 or more, use the checkpoint as it was written")
    return {**values, "step": step}


def _group(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    if "mode" in saved:
        taken = {key: value for key, value in saved.items() if key not in (*_OTHERS, *_UNCLIPPED, "step")}
    else:
        taken = {key: saved[key] for key in _SHARED if key in saved}
    kept = {key: value for key, value in now.items() if key != "params"}
    return {**kept, **taken, "params": saved["params"]}


def moments_of(state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Tensor, dict[str, Tensor]]:
    """The moments of an imported state in fp32, which PyTorch's own loading would round to the parameter's type."""
    found = {}
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            values = state_dict["state"].get(index)
            if values is not None:
                found[parameter] = {
                    name: values[name].detach().to(parameter.device, torch.float32, copy=True) for name in _MOMENTS
                }
    return found
