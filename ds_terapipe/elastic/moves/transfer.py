"""Transfer of a model's layers from one placement to another: which tensors go from which rank to which.

Everything is addressed by parameter name: weights, buffers, the optimiser's moments and step counts, the parameter
group, and attributes set on a parameter or a module after it was built. A rank receives only tensors that it lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from ds_terapipe.elastic.moves.attributes import checksums, is_plain, to_host
from ds_terapipe.elastic.moves.groups import numbers
from ds_terapipe.elastic.policies.resize import POLICY
from ds_terapipe.errors import ConfigError
from ds_terapipe.optim.step_rules import DeviceSteps

MASTER = "ds_terapipe_master"  # key of the fp32 weights in a parameter's state
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Kind(NamedTuple):
    """Shape and type of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorInfo:
    """Description of a parameter or buffer on its rank.

    Attributes:
        kind: shape and type of its values.
        is_parameter: else a buffer.
        requires_grad: whether it is trained.
        attributes: plain values set on it.
        group: number of its parameter group; None: not in the optimiser.
        moments: tensors of the optimiser's state that are sent, by name.
        values: the rest of the optimiser's state, each tensor in it `OnHost`.
        used: whether the optimiser has ever had a gradient for it, as its moments show.
    """

    kind: Kind
    is_parameter: bool = False
    requires_grad: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None
    moments: Mapping[str, Kind] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    used: bool = True


@dataclass(frozen=True)
class StageState:
    """Description of the tensors of a stage.

    Attributes:
        tensors: by name.
        modules: class, hooks, plain attributes, checksums of tensors among these and buffers that checkpoints leave out, of
            its modules, by their names.
        same: groups of names that are one trained parameter.
    """

    tensors: Mapping[str, TensorInfo]
    modules: Mapping[str, Mapping[str, Any]]
    same: Sequence[Sequence[str]] = ()


def stage_state(
    layers: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer, shared: Sequence[str] = ()
) -> StageState:
    """Describe this rank's parameters, buffers and modules.

    Args:
        layers: layers by prefix.
        optimizer: optimiser of their parameters.
        shared: prefixes of modules that several stages may hold; for these it is checked whether they are used.
    """
    group_of = numbers(optimizer)
    tensors, modules = {}, {}
    names: defaultdict[int, list[str]] = defaultdict(list)
    for prefix, layer in layers.items():
        for name, parameter in layer.named_parameters():
            names[id(parameter)] += [prefix + name] * parameter.requires_grad
            state = optimizer.state.get(parameter, {})
            sent = sent_of(state)
            tensors[prefix + name] = TensorInfo(
                kind_of(parameter),
                True,
                parameter.requires_grad,
                {key: value for key, value in vars(parameter).items() if is_plain(value)},
                group_of.get(id(parameter)),
                {key: kind_of(value) for key, value in sent.items()},
                {key: to_host(described(value)) for key, value in state.items() if key not in sent},
                prefix not in shared or has_moved(state),
            )
        for name, buffer in layer.named_buffers():
            tensors[prefix + name] = TensorInfo(kind_of(buffer))
        for name, module in layer.named_modules():
            modules[prefix + name] = _about(module)
    return StageState(tensors, modules, [each for each in names.values() if len(each) > 1])


def kind_of(tensor: Tensor) -> Kind:
    """Return the shape and type."""
    return Kind(tuple(tensor.shape), tensor.dtype)


def sent_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's optimiser state that are sent, in an order that all ranks know.

    A step count on the CPU is part of the description. One on a device is sent: unpickled from the description, it
    would be on the sender's device.
    """
    return {
        key: value
        for key, value in sorted(state.items())
        if isinstance(value, Tensor) and (value.numel() > 1 or value.device.type != "cpu")
    }


def described(value: Any) -> Any:
    """Return a value of an optimiser's state without tensors on a device."""
    return int(value) if isinstance(value, DeviceSteps) else value


def has_moved(state: Mapping[str, Any]) -> bool:
    """Whether an optimizer has ever had a gradient for a parameter, as its moments show."""
    return any(
        isinstance(value, Tensor) and bool(value.any()) for key, value in state.items() if key not in ("step", MASTER)
    )


def _about(module: nn.Module) -> dict[str, Any]:
    settings = {key: value for key, value in vars(module).items() if is_plain(value)}
    found = [getattr(module, name, {}) for name in _HOOKS]
    for parameter in module.parameters(recurse=False):
        found += [getattr(parameter, name, None) or {} for name in _PARAMETER_HOOKS]
    hooks = sum(_is_a_users(hook) for each in found for hook in each.values())
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    unsaved = sorted(module._non_persistent_buffers_set)
    return {"class": kind, "hooks": hooks, "settings": settings, "tensors": checksums(module), "unsaved": unsaved}


def _is_a_users(hook: Any) -> bool:
    """Whether a hook is the user's: DeepSpeed's wrappers and this package register their own again."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.partition(".")[0] not in ("deepspeed", "ds_terapipe")


def authority(name: str, states: Mapping[int, StageState]) -> int:
    """Return the stage whose copy of a name counts: the first that has used it, else the first that has it."""
    having = sorted(stage for stage, each in states.items() if name in each.tensors)
    return next((stage for stage in having if states[stage].tensors[name].used), having[0])


def check_structure(prefix: str, built: nn.Module, source: StageState, key: str = POLICY) -> None:
    """Refuse changes to a live layer that a rebuild on another rank would lose; ``key``: of the setting that moves it.

    Raises:
        ConfigError: modules, parameters or hooks of the live layer that its spec does not build.
    """
    new = {prefix + name: _about(module) for name, module in built.named_modules()}
    for name, about in source.modules.items():
        if name.startswith(prefix) and (name not in new or new[name]["class"] != about["class"]):
            raise _lost(f"module {name.rstrip('.')} ({about['class'].rpartition('.')[2]})", "set", key)
        if name.startswith(prefix) and about["hooks"] != new[name]["hooks"]:
            raise _lost(f"{about['hooks']} hooks on module {name.rstrip('.')}", "registered", key)
    parameters = {prefix + name: kind_of(p) for name, p in built.named_parameters()}
    live = {name: info.kind for name, info in source.tensors.items() if name.startswith(prefix) and info.is_parameter}
    for name in [*live, *parameters]:
        if live.get(name) != parameters.get(name):
            raise _lost(
                f"parameter {name}, {_shown(live.get(name))}, built as {_shown(parameters.get(name))}", "set", key
            )


def check_same(layers: Mapping[str, nn.Module], source: StageState, key: str = POLICY) -> None:
    """Refuse layers that would hold copies of one parameter.

    ``layers``: by the prefix of their names; ``key``: of the setting that moves them.

    Raises:
        ConfigError: naming two of them.
    """
    for names in source.same:
        here = [(name, prefix) for name in names for prefix in layers if name.startswith(prefix)]
        found = {id(layers[prefix].get_parameter(name.removeprefix(prefix))): name for name, prefix in here}
        if len(found) > 1:
            raise _lost(f"one parameter as {' and '.join(sorted(found.values())[:2])}", "set", key)


def _shown(kind: Kind | None) -> str:
    return "none" if kind is None else f"{list(kind.shape)} of {kind.dtype}"


def _lost(what: str, how: str, key: str) -> ConfigError:
    use = '"off"' if key == POLICY else "1"
    return ConfigError(
        f"{key}: got {what}, {how} on a live layer, which the layer's spec does not build on another rank, must be part of "
        f"the LayerSpec, use a LayerSpec or module that has it from the start, or {use}"
    )
