"""Parameter groups of an optimiser whose parameters change: one list of groups on all ranks, empty ones included.

Schedulers and checkpoints count groups, and a parameter that moves to another rank must find its settings there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from torch import Tensor, nn

from ds_terapipe.elastic.moves.layers import LOSS
from ds_terapipe.pipeline.parameter_groups import keep_trained, outside, tell


def numbers(optimizer: Any) -> dict[int, int]:
    """Return the group number of each parameter, by ``id``; empty if the optimiser is None."""
    groups = [] if optimizer is None else optimizer.param_groups
    return {id(p): number for number, group in enumerate(groups) for p in group["params"]}


def refill(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    group_of: Mapping[str, int],
    states: Mapping[str, dict[str, Any]],
    settings: Sequence[Mapping[str, Any]] | None = None,
    outside: Sequence[Tensor] = (),
) -> None:
    """Set an optimiser's parameters to those of a module, in the module's order; the optimiser object stays.

    Args:
        optimizer: a torch optimiser, or an object with its attributes.
        module: module with the new parameters.
        group_of: group number of each parameter to include, by name.
        states: states of parameters that are new here, by name; others keep theirs.
        settings: of the groups; None: as they are.
        outside: parameters outside the module, which stay in their groups after the others.
    """
    number_of = numbers(optimizer)
    kept: dict[Tensor, dict[str, Any]] = {}
    lists: list[list[Any]] = [[] for _ in optimizer.param_groups]
    for name, parameter in module.named_parameters():
        if name not in group_of:
            continue
        lists[group_of[name]].append((name, parameter))
        state = states.get(name, optimizer.state.get(parameter))
        if state:
            kept[parameter] = state
    for other in outside:
        lists[number_of[id(other)]].append(("", other))
        if optimizer.state.get(other):
            kept[other] = optimizer.state[other]
    optimizer.state.clear()
    optimizer.state.update(kept)
    for number, (group, members) in enumerate(zip(optimizer.param_groups, lists, strict=True)):
        if settings is not None:
            group.update(settings[number])
        group["params"] = [parameter for _, parameter in members]
        if "param_names" in group:
            group["param_names"] = [name for name, _ in members]
    tell(optimizer)


def in_order(optimizer: torch.optim.Optimizer, module: nn.Module, names: Mapping[Any, str]) -> None:
    """Sort the parameters into the module's order at the start, as after a reshape: checkpoints number them.

    Stand-in parameters are removed, as on a stage that trains nothing, with the groups that only had them. So is the
    loss if it is not trained.
    """
    groups = optimizer.param_groups
    kept = set(map(id, [*module.parameters(), *outside(optimizer, module, names)]))
    groups[:] = [each for each in groups if not each["params"] or any(id(p) in kept for p in each["params"])]
    number_of = numbers(optimizer)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad or not name.startswith(LOSS)]
    group_of = {name: number_of[id(p)] for name, p in named if id(p) in number_of}
    refill(optimizer, module, group_of, {}, outside=outside(optimizer, module, names))


def release(optimizer: torch.optim.Optimizer) -> int:
    """Remove parameters that no longer train from an optimiser; return the bytes of state that were freed."""
    return sum(getattr(value, "nbytes", 0) for value in keep_trained(optimizer))  # of tensors, and shares of them


def has_one_count(optimizer: Any) -> bool:
    """Whether a group has one step count: in DeepSpeed's FusedAdam, also the one within its Muon."""
    return isinstance(getattr(optimizer, "aux_optimizer", optimizer), FusedAdam)


def level_steps(optimizer: Any) -> None:
    """Copy the step count of a group to all of its parameters, in an optimizer of `has_one_count`.

    DeepSpeed's FusedAdam keeps the count in the state of the group's last parameter and passes it to its kernel for all of them
    (ops/adam/fused_adam.py, 0.19.8). With other parameters, or in another order, the count would restart.
    """
    if not has_one_count(optimizer):
        return
    for group in optimizer.param_groups:
        states = [
            state for p in group["params"] if (state := optimizer.state.get(p)) and isinstance(state.get("step"), int)
        ]
        most = max((state["step"] for state in states), default=0)
        for state in states:
            state["step"] = most
