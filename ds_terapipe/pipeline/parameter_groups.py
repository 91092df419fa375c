"""Parameter groups of an optimizer on the stages of a pipeline: the same list on every rank, none of them empty.

DeepSpeed's wrappers make a flat tensor of each group, and ZeRO takes norms group by group over all stages (0.19.8). A
stage without trained parameters in a group ends with an IndexError, and a stage without the group leaves the others
waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.constants import BFLOAT16
from torch import nn

from ds_terapipe.deepspeed_state import groups_of
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import UNUSED

OF_PARAMETERS = ("params", "param_names")


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key not in OF_PARAMETERS}


def names_in(engine: Any) -> list[list[str | None]]:
    """Return the names of an engine's optimizer's parameters, by group and in its order; None for one outside the module."""
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    wrapper = engine.optimizer
    wrapped = isinstance(wrapper, DeepSpeedOptimizer)
    groups = groups_of(wrapper) if wrapped else [group["params"] for group in getattr(wrapper, "param_groups", ())]
    return [[name_of.get(id(parameter)) for parameter in group] for group in groups]


def tell(optimizer: Any) -> None:
    """Notify a ``FusedLamb``, which keeps tables of its parameters."""
    changed = getattr(optimizer, "parameters_changed", None)
    if changed is not None:
        changed()


def unused(like: nn.Module, device: torch.device, names: dict[Any, str]) -> nn.Parameter:
    """Make a stand-in parameter [1] for a rank without parameters.

    Args:
        like: module whose first parameter gives the type, and attributes by which the user may form groups.
        device: device of the parameter.
        names: the engine's parameter names for its wrappers; the new name is added.
    """
    first = next(like.parameters(), torch.zeros(0))
    found = nn.Parameter(torch.zeros(1, dtype=first.dtype, device=device))
    marks = {key: value for key, value in vars(first).items() if isinstance(value, (bool, int, float, str))}
    vars(found).update(marks)
    names[found] = UNUSED
    return found


def is_unused(parameter: Any, names: Mapping[Any, str]) -> bool:
    """Whether :func:`unused` made the parameter."""
    return names.get(parameter) == UNUSED


def keep_trained(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Remove frozen parameters from all groups, which may become empty; return the values of their state."""
    gone = list[Any]()
    for group in optimizer.param_groups:
        kept = [parameter.requires_grad for parameter in group["params"]]
        for parameter in group["params"]:
            if not parameter.requires_grad:
                gone += optimizer.state.pop(parameter, {}).values()
        for key in OF_PARAMETERS:
            if key in group:
                group[key] = [each for each, trained in zip(group[key], kept, strict=True) if trained]
    tell(optimizer)
    return gone


def drop_unused(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> None:
    """Remove groups whose only parameters were made by :func:`unused`."""
    groups = optimizer.param_groups
    groups[:] = [each for each in groups if not each["params"] or not all(is_unused(p, names) for p in each["params"])]


def outside(optimizer: Any, module: nn.Module, names: Mapping[Any, str]) -> list[nn.Parameter]:
    """Return trained parameters of an optimizer that are not the module's.

    On a rank that trains nothing of the module the result is empty: its parameters are only there because an optimizer
    needs one.
    """
    here, members = set(map(id, module.parameters())), [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad and id(p) in here for p in members):
        return []
    return [p for p in members if p.requires_grad and id(p) not in here and not is_unused(p, names)]


def check_inside(
    optimizer: Any, module: nn.Module, names: Mapping[Any, str], gather: Callable[[Any], list[Any]], where: str
) -> None:
    """Refuse parameters of :func:`outside`; collective.

    Args:
        optimizer, module, names: see :func:`outside`.
        gather: gathers any value of every rank.
        where: condition for the error message.

    Raises:
        ConfigError: naming the first, on every rank.
    """
    found, said = outside(optimizer, module, names), None
    if found:
        groups = optimizer.param_groups
        number, place = next((n, i) for n, g in enumerate(groups) for i, p in enumerate(g["params"]) if p is found[0])
        name = groups[number].get("param_names", {place: place})[place]
        said = f"got parameter {name} of group {number}, of shape {list(found[0].shape)}"
    for got in filter(None, gather(said)):
        raise ConfigError(
            f"optimizer: {got}, must be in the PipelineModule {where}, use a layer, or a loss_fn that is an nn.Module, to hold it"
        )


def make_alike(optimizer: torch.optim.Optimizer, scheduler: Any, gather: Callable[[Any], list[Any]]) -> None:
    """Give all ranks the same list of groups; collective.

    Groups with equal settings are the same group; several of them on a rank match by their order. A rank gets an empty
    group for each that it lacks.

    Raises:
        ConfigError: on every rank, for a scheduler that was made for fewer groups, or for these in another order.
    """
    mine = _numbered(optimizer.param_groups)
    known: dict[tuple[str, int], dict[str, Any]] = {}
    for of_rank in gather({key: settings_of(group) for key, group in mine.items()}):
        known.update(of_rank)
    # a scheduler counts groups; torch's, which the user may keep, wraps the optimizer's step
    made = hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched") or not (
        scheduler is None or callable(scheduler)
    )
    for rank, keys in enumerate(gather(list(mine) if made else None)):
        if keys not in (None, list(known)):
            raise ConfigError(
                f"optimizer: got {len(keys)} parameter groups on rank {rank} and {len(known)} on all ranks together, and a "
                "scheduler that was made for them, must be the same groups in the same order on all ranks, use a function that "
                "makes the scheduler, or groups with a parameter on every stage"
            )
    named: dict[str, Any] = (
        {"param_names": []} if any("param_names" in group for group in optimizer.param_groups) else {}
    )
    for key, settings in known.items():
        if key not in mine:
            optimizer.add_param_group({"params": [], **named, **settings})
            mine[key] = optimizer.param_groups[-1]
    optimizer.param_groups[:] = [mine[key] for key in known]


def arrange(
    optimizer: torch.optim.Optimizer,
    kind: str,
    module: nn.Module,
    names: Mapping[Any, str],
    scheduler: Any,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Arrange the groups for DeepSpeed's wrapper ``kind``: trained parameters of the module, alike on all ranks; collective.

    Args:
        optimizer: the optimizer to be wrapped.
        kind: as ``DeepSpeedEngine._do_optimizer_sanity_check`` returns it.
        module, names, gather: see :func:`check_inside`.
        scheduler: made for the groups, if any.
    """
    check_inside(optimizer, module, names, gather, "beside bf16, fp16 or ZeRO")
    keep_trained(optimizer)
    counts = set(gather(len(optimizer.param_groups)))
    # BF16_Optimizer takes one norm over all existing groups, the others one of each group
    if len(counts) > 1 and (kind != BFLOAT16 or 0 in counts):
        drop_unused(optimizer, names)
        make_alike(optimizer, scheduler, gather)


def refuse_switched(
    switches: Iterable[tuple[str, nn.Parameter, bool]],
    optimizer: torch.optim.Optimizer,
    wrapper: Any,
    forward_only: Iterable[nn.Module],
) -> None:
    """Refuse a change of ``requires_grad`` that would have no effect.

    Wrappers step with flat tensors that they have made, and forward-only layers get no gradient.

    Args:
        switches: names, parameters, and ``requires_grad`` when the engine was made.
        optimizer: the user's.
        wrapper: the engine's, the same one or DeepSpeed's around it.
        forward_only: layers without backward.
    """
    switched = [(name, p) for name, p, before in switches if p.requires_grad is not before]
    if not switched:
        return
    wrapped, forward = (
        isinstance(wrapper, DeepSpeedOptimizer),
        {id(p) for each in forward_only for p in each.parameters()},
    )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in switched:
        if wrapped or (p.requires_grad and (id(p) in forward or id(p) not in stepped)):
            raise ConfigError(
                f"model: got {name}.requires_grad {p.requires_grad} after initialize, must be set before it (now it has no "
                'effect), use elastic_pipeline.freeze, e.g. {"policy": "schedule", "frozen_layers": [[10, 2]]}'
            )


def _numbered(groups: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return groups by their settings, and by their number among those with the same."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    seen = Counter[str]()
    for group in groups:
        text = repr(sorted(settings_of(group).items()))
        found[text, seen[text]] = group
        seen[text] += 1
    return found


def occupy(optimizer: torch.optim.Optimizer, module: nn.Module, device: torch.device, names: dict[Any, str]) -> None:
    """Give each empty group an unused parameter.

    Args:
        optimizer: the optimizer to be wrapped.
        module: module that gives the type.
        device: device of the parameters.
        names: the engine's parameter names for its wrappers.
    """
    for group in optimizer.param_groups:
        if not group["params"]:
            group["params"] = [unused(module, device, names)]
            if "param_names" in group:
                group["param_names"] = [UNUSED]
    tell(optimizer)
    if hasattr(optimizer, "set_names"):  # FusedLamb leaves these out of its statistics
        optimizer.set_names({parameter: name for parameter, name in names.items() if name == UNUSED})
