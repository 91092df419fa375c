"""Optimizer state in the form of a checkpoint, by parameter name.

DeepSpeed 0.19.8 saves a torch optimizer's state with parameters by number, and the wrappers' flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from ds_terapipe.deepspeed_state import saved_fragments, saved_partitions
from ds_terapipe.elastic.moves.masters import is_wrapped
from ds_terapipe.elastic.moves.transfer import MASTER

PLAIN, FLAT, WHOLE = "plain", "flat", "fp16"  # a torch optimizer's; parts of replicas; of fp16 without ZeRO
# Key of the torch optimizer's state in the state of a wrapper.
BASE = {FLAT: "base_optimizer_state", WHOLE: "optimizer_state_dict"}


class Elements(NamedTuple):
    """Elements of a parameter's tensor, flattened: all, or a replica's."""

    values: Tensor


def layout_of(engine: Any) -> str:
    """Return how an engine saves its optimizer's state."""
    if engine.zero_optimization() or isinstance(engine.optimizer, BF16_Optimizer):
        return FLAT
    return WHOLE if is_wrapped(engine.optimizer) else PLAIN


def groups_in(kind: str, saved: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the parameter groups of a saved state of a layout ``kind``."""
    groups: Sequence[dict[str, Any]] = (saved[BASE[kind]] if kind in BASE else saved)["param_groups"]
    return groups


def states_in(
    kind: str, saved: Mapping[str, Any], groups: Sequence[Sequence[Any]], sizes: Mapping[str, int], levels: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter's name and state, with a master if a wrapper had one.

    Args:
        kind: layout of the state.
        saved: the state, of an optimizer or of its wrapper.
        groups: names by parameter group, None for one outside the module.
        sizes: numbers of elements, by name.
        levels: whether the last parameter of a group has the step count of all, as in a ``FusedAdam``.
    """
    if kind == PLAIN:
        yield from _plain(saved, groups, levels)
        return
    base = saved[BASE[kind]]
    if kind == FLAT:
        for group, (flat, of_names) in zip(base["param_groups"], saved_partitions(saved), strict=True):
            (number,) = group["params"]
            for name, elements in of_names.items():
                yield name, _of(base["state"].get(number, {}), flat, elements)
        return
    counts = [[1 if name is None else sizes[name] for name in names] for names in groups]
    for names, of_group in zip(groups, saved_fragments(saved, counts), strict=True):
        for name, (number, master, elements) in zip(names, of_group, strict=True):
            if name is not None:
                yield name, _of(base["state"].get(number, {}), master, elements)


def _plain(saved: Mapping[str, Any], groups: Sequence[Sequence[Any]], levels: bool) -> Iterator[tuple[str, Any]]:
    for group, names in zip(saved["param_groups"], groups, strict=True):
        states = [saved["state"].get(number, {}) for number in group["params"]]
        steps = [state["step"] for state in states if isinstance(state.get("step"), int)] if levels else []
        for name, state in zip(names, states, strict=True):
            if name is not None:
                yield name, {**state, **({"step": max(steps)} if state and steps else {})}


def _of(state: Mapping[str, Any], master: Tensor, elements: slice) -> dict[str, Any]:
    """Return a parameter's elements of a master, and of what is like it."""
    found: dict[str, Any] = {}
    for key, value in {**state, MASTER: master}.items():
        if not isinstance(value, Tensor):
            found[key] = value
        elif key != "step" and (value.dim() == 1 or value.shape == master.shape):
            found[key] = Elements(value.detach().view(-1)[elements])
        else:
            found[key] = value.clone()  # a step count too: a torch optimizer adds to that of each parameter
    return found
