"""Optimiser state of a checkpoint by parameter name, for an engine of another shape.

DeepSpeed 0.19.8 writes a torch optimiser's state with the other states of a stage, parameters by number. The flat parts
of ``BF16_Optimizer`` and ZeRO are in a file for each rank, with the location of every name. The names and files are
recorded when a checkpoint is saved (:func:`about`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_terapipe import tensor_files
from ds_terapipe.elastic.moves.layers import LOSS
from ds_terapipe.elastic.moves.transfer import has_moved
from ds_terapipe.elastic.saved.by_name import FLAT, PLAIN, Elements, groups_in, layout_of, states_in
from ds_terapipe.errors import ConfigError, bad_value, one_line
from ds_terapipe.pipeline.parameter_groups import settings_of
from ds_terapipe.pipeline.saved_files import MOMENTS


def about(engine: Any, names: Sequence[Sequence[str | None]]) -> dict[str, Any] | None:
    """Return a checkpoint's record of this rank's part, with these ``names``; None if no other rank needs it."""
    coordinates = engine.module._topo.get_coord(engine.global_rank)
    if engine.basic_optimizer is None:
        return None
    kind = layout_of(engine)
    if kind != FLAT and coordinates.data:
        return None
    path = engine._get_zero_ckpt_name("", "") if kind == FLAT else engine._get_ckpt_name("", "")
    return {
        "kind": kind,
        "stage": coordinates.pipe,
        "data": coordinates.data,
        "tensor": getattr(coordinates, "model", 0),
        "file": Path(path).name,
        "groups": names,
    }


class SavedStates:
    """Optimiser states for the parameters of this rank.

    Args:
        folder: folder of the checkpoint.
        parts: what :func:`about` noted on every rank.
        tensor: this rank's tensor-parallel index.
        groups: present number of parameter groups.
        number_of: present group numbers, by the names of all ranks: other stages may order groups differently.
        wanted: this rank's parameters, by name.
        sizes: numbers of elements, by the names of all ranks.
        levels: whether the last parameter of a group has the step count of all, as in a ``FusedAdam``.

    Attributes:
        states: optimiser states by name, whole; with a master if a wrapper had one.
        settings: of the parameter groups, in their order; an empty group keeps those of the file that was read.
        scale: loss scale, and other values that a wrapper saved beside tensors.

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
        sizes: Mapping[str, int] | None = None,
        levels: bool = False,
    ) -> None:
        self.states: dict[str, dict[str, Any]] = {}
        self.settings: list[dict[str, Any]] = []
        self.scale: dict[str, Any] = {}
        self._folder, self._wanted, self._sizes = folder, wanted, sizes or {}
        self._copies: dict[str, dict[int, dict[str, Any]]] = {}  # states by name and stage
        mine = _of_tensor(parts, tensor)
        self._check_parts(mine, groups)
        now = _numbers_now(mine, groups, number_of)
        for part in read_by(parts, tensor, wanted):
            with _named(folder / part["file"]):
                of_groups = [settings_of(group) for group in self._take(part, levels)]
            self.settings = self.settings or [of_groups[now.index(number)] for number in range(groups)]
            for then, members in enumerate(part["groups"]):
                if any(name in wanted for name in members):
                    self.settings[now[then]] = of_groups[then]
        for name, copies in self._copies.items():
            with _named(folder):
                for state in copies.values():
                    state.update({key: _whole(key, value, wanted[name].shape) for key, value in state.items()})
            self.states[name] = _of_copies(name, list(copies.values()))

    def _check_parts(self, mine: Sequence[Mapping[str, Any]], groups: int) -> None:
        known = {name for part in mine for group in part["groups"] for name in group}
        missing = sorted(set(self._wanted) - known)
        if missing or not mine:
            raise ConfigError(
                f"load_checkpoint: got {self._folder} without the optimizer's state of "
                f"{', '.join(missing[:3]) or 'any parameter'}, must have it of all that is trained, use "
                "load_optimizer_states=False or another checkpoint"
            )
        counts = {len(part["groups"]) for part in mine}
        if counts != {groups}:
            raise bad_value(
                "load_checkpoint: optimizer",
                f"{sorted(counts)} parameter groups",
                f"{groups} as there are now",
                "the same",
            )

    def _take(self, part: Mapping[str, Any], levels: bool) -> Sequence[dict[str, Any]]:
        """Read a part's states of the wanted parameters; return its parameter groups."""
        kind, stage = part["kind"], part["stage"]
        saved = _read(self._folder / part["file"], "optimizer_state_dict" if kind == FLAT else "optimizer")
        if kind != PLAIN:
            self.scale = {key: value for key, value in saved.items() if not isinstance(value, (Tensor, list, dict))}
        for name, state in states_in(kind, saved, part["groups"], self._sizes, levels):
            if name in self._wanted and state:
                mine = self._copies.setdefault(name, {}).setdefault(stage, {})
                for key, value in state.items():
                    if isinstance(value, Elements):
                        mine.setdefault(key, []).append(value.values.clone())
                    else:
                        mine.setdefault(key, value)
        return groups_in(kind, saved)


def _of_copies(name: str, copies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state that counts of those in the files of several stages, in their order.

    Of a tied module a stage may have a weight that another stage alone uses. A loss is used on the last one.
    """
    in_doubt = copies[-1 if name.startswith(LOSS) else 0]
    return next((state for state in copies if has_moved(state)), in_doubt)


def _read(path: Path, key: str) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], tensor_files.read("load_checkpoint", path, mapped=False)[key])


def _whole(key: str, value: Any, shape: torch.Size) -> Any:
    """Join flat parts, in the order of replicas; refuse a moment of another shape, which would fail at the next step."""
    if isinstance(value, list):
        return torch.cat(value).view(shape)
    if key in MOMENTS and isinstance(value, Tensor) and value.shape != shape:
        raise ValueError(f"{key} of shape {list(value.shape)}, not {list(shape)}")
    return value


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
        raise ConfigError(
            f"load_checkpoint: got {path} ({one_line(error)}), must be as it was saved, use another checkpoint"
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
