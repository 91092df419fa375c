"""Optimiser state of a checkpoint by parameter name, for an engine of another shape.

DeepSpeed 0.19.8 writes a torch optimiser's state with the other states of a stage, parameters by number. The flat parts
of ``BF16_Optimizer`` and ZeRO-1 are in a file for each rank, with the location of every name. The names and files are
recorded when a checkpoint is saved (:func:`about`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_terapipe import tensor_files
from ds_terapipe.deepspeed_state import groups_of, saved_partitions
from ds_terapipe.elastic.moves.groups import numbers
from ds_terapipe.elastic.moves.masters import MASTER, is_wrapped
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.pipeline.parameter_groups import settings_of, tell

_PLAIN, _FLAT, _FP16 = "plain", "flat", "fp16"


def about(engine: Any) -> dict[str, Any] | None:
    """Return a checkpoint's record of this rank's part; None if no other rank needs it."""
    coordinates = engine.module._topo.get_coord(engine.global_rank)
    if engine.basic_optimizer is None:
        return None
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    kind = _FP16 if engine.fp16_enabled() else _FLAT if is_wrapped(engine.optimizer) else _PLAIN
    if kind == _PLAIN and coordinates.data:
        return None
    groups = [g["params"] for g in engine.basic_optimizer.param_groups]
    if kind != _PLAIN:
        groups = groups_of(engine.optimizer)
    path = engine._get_zero_ckpt_name("", "") if kind == _FLAT else engine._get_ckpt_name("", "")
    return {
        "kind": kind,
        "stage": coordinates.pipe,
        "data": coordinates.data,
        "tensor": getattr(coordinates, "model", 0),
        "file": Path(path).name,
        "groups": [[name_of.get(id(parameter)) for parameter in group] for group in groups],
    }


def numbers_of(engine: Any) -> dict[str, int]:
    """Return the parameter group number of each of this rank's trained parameters, by name."""
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    number_of = numbers(engine.basic_optimizer)
    if is_wrapped(engine.optimizer):
        number_of = {id(p): number for number, group in enumerate(groups_of(engine.optimizer)) for p in group}
    return {name_of[key]: number for key, number in number_of.items() if key in name_of}


class SavedStates:
    """Optimiser states for the parameters of this rank.

    Args:
        folder: folder of the checkpoint.
        parts: what :func:`about` noted on every rank.
        tensor: this rank's tensor-parallel index.
        groups: present number of parameter groups.
        number_of: present group numbers, by the names of all ranks: other stages may order groups differently.
        wanted: this rank's parameters, by name.

    Attributes:
        states: optimiser states by name, whole; with a master if they were flat parts.
        settings: of the parameter groups, in their order; an empty group keeps those of the file that was read.

    Raises:
        ConfigError: a parameter is in no file, or the groups differ.
    """

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Mapping[str, Any] | None],
        tensor: int,
        groups: int,
        number_of: Mapping[str, int],
        wanted: Mapping[str, nn.Parameter],
    ) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self.settings: list[dict[str, Any]] = []
        self._wanted = wanted
        self._stage_of: dict[str, int] = {}  # stage from whose files a parameter's flat parts are read
        mine = _of_tensor(parts, tensor)
        known = {name for part in mine for group in part["groups"] for name in group}
        missing = sorted(set(wanted) - known)
        if missing or not mine:
            raise ConfigError(
                f"load_checkpoint: got {folder} without the optimizer's state of {', '.join(missing[:3]) or 'any parameter'}, "
                "must have it of all that is trained, use load_optimizer_states=False or another checkpoint"
            )
        if any(part["kind"] == _FP16 for part in mine):
            raise bad_value(
                "load_checkpoint", f"{folder} of fp16, saved in another shape", "of bf16 or fp32",
                "as many processes as it was saved with, and the same elastic_pipeline.resize.policy",
            )  # fmt: skip
        counts = {len(part["groups"]) for part in mine}
        if counts != {groups}:
            raise bad_value(
                "load_checkpoint: optimizer",
                f"{sorted(counts)} parameter groups",
                f"{groups} as there are now",
                "the same",
            )
        now = _numbers_now(mine, groups, number_of)
        for part in read_by(parts, tensor, wanted):
            with _named(folder / part["file"]):
                of_groups = self._read_flat(folder, part) if part["kind"] == _FLAT else self._read_plain(folder, part)
            self.settings = self.settings or [of_groups[now.index(number)] for number in range(groups)]
            for then, members in enumerate(part["groups"]):
                if any(name in wanted for name in members):
                    self.settings[now[then]] = of_groups[then]
        for name, state in self.states.items():
            for key, value in state.items():
                if isinstance(value, list):  # flat parts, in the order of replicas
                    with _named(folder):
                        state[key] = torch.cat(value).view(wanted[name].shape)

    def _read_plain(self, folder: Path, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        saved = tensor_files.read("load_checkpoint", folder / part["file"], mapped=False)["optimizer"]
        for group, names in zip(saved["param_groups"], part["groups"], strict=True):
            for number, name in zip(group["params"], names, strict=True):
                if name in self._wanted and number in saved["state"]:
                    self.states[name] = dict(saved["state"][number])
        return [settings_of(group) for group in saved["param_groups"]]

    def _read_flat(self, folder: Path, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        saved = tensor_files.read("load_checkpoint", folder / part["file"], mapped=False)["optimizer_state_dict"]
        base = saved["base_optimizer_state"]
        for group, (flat, of_names) in zip(base["param_groups"], saved_partitions(saved), strict=True):
            (number,) = group["params"]
            state = base["state"].get(number, {})
            pieces = {key: value for key, value in state.items() if _is_part(key, value)}
            plain = {key: value for key, value in state.items() if key not in pieces}
            for name, elements in of_names.items():
                # a tied weight is in the files of several stages, the same in each
                if name not in self._wanted or self._stage_of.setdefault(name, part["stage"]) != part["stage"]:
                    continue
                mine = self.states.setdefault(name, {})
                mine.update({key: value for key, value in plain.items() if key not in mine})
                for key, value in {**pieces, MASTER: flat}.items():
                    mine.setdefault(key, []).append(value.detach()[elements].clone())
        return [settings_of(group) for group in base["param_groups"]]


def _of_tensor(parts: Sequence[Mapping[str, Any] | None], tensor: int) -> list[Mapping[str, Any]]:
    mine = [part for part in parts if part is not None and part["tensor"] == tensor]
    return sorted(mine, key=lambda part: (part["stage"], part["data"]))


def read_by(parts: Sequence[Mapping[str, Any] | None], tensor: int, names: Collection[str]) -> list[Mapping[str, Any]]:
    """Return the parts of :func:`about` that a rank reads for the parameters ``names``; the first for the settings."""
    mine = _of_tensor(parts, tensor)
    return [p for n, p in enumerate(mine) if n == 0 or any(name in names for group in p["groups"] for name in group)]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Context manager that names the file in an error while a file of another checkpoint is read."""
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ConfigError(
            f"load_checkpoint: got {path} ({why}), must be as it was saved, use another checkpoint"
        ) from error


def _numbers_now(parts: Sequence[Mapping[str, Any]], groups: int, number_of: Mapping[str, int]) -> list[int]:
    """Return the present number of each parameter group of a checkpoint; untrained groups keep their order.

    Raises:
        ConfigError: parameters of one group are in several now, or the other way round.
    """
    found: list[set[int]] = [set() for _ in range(groups)]
    for part in parts:
        for then, members in enumerate(part["groups"]):
            found[then] |= {number_of[name] for name in members if name in number_of}
    numbers = [number for each in found for number in each]
    if any(len(each) > 1 for each in found) or len(set(numbers)) < len(numbers):
        must = "of the same parameters as there are now"
        raise bad_value(
            "load_checkpoint: optimizer", "other parameter groups", must, "the optimizer that it was saved with"
        )
    left = iter(sorted(set(range(groups)) - set(numbers)))
    return [next(iter(each)) if each else next(left) for each in found]


def put(optimizer: torch.optim.Optimizer, module: nn.Module, saved: SavedStates, flat: bool) -> None:
    """Load a checkpoint's states and settings into an optimiser of the module's parameters.

    Args:
        optimizer: a torch optimiser; before it is wrapped, it has parameters of 16 bits and states of 32:
        flat: whether it is about to be wrapped.
        module: module of its parameters.
        saved: states of all of them.
    """
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if not flat:
        number_of = {name: number for number, name in enumerate(name for group in groups for name in group)}
        state = {number: saved.states[name] for name, number in number_of.items() if name in saved.states}
        param_groups = [
            {**settings, "params": [number_of[name] for name in names]}
            for settings, names in zip(saved.settings, groups, strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": param_groups})
        return
    optimizer.state.clear()  # load_state_dict would round it to the parameters' type
    for group in optimizer.param_groups:
        counts_there = bool(group.get("fused") or group.get("capturable"))  # as in torch's load_state_dict
        for parameter in group["params"]:
            of_it = saved.states.get(name_of[id(parameter)], {})
            optimizer.state[parameter] = {key: _placed(value, parameter, counts_there) for key, value in of_it.items()}
    for group, settings in zip(optimizer.param_groups, saved.settings, strict=True):
        group.update({key: value for key, value in settings.items() if key in group})
    tell(optimizer)


def _placed(value: Any, parameter: nn.Parameter, counts_there: bool) -> Any:
    """Move a step count to the parameter's device if ``counts_there``; masters and moments stay until they are divided."""
    moves = isinstance(value, Tensor) and counts_there and value.shape != parameter.shape
    return value.to(parameter.device) if moves else value


def _is_part(key: str, value: Any) -> bool:
    return key != "step" and isinstance(value, Tensor) and value.dim() == 1
