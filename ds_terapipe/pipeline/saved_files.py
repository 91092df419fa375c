"""Checkpoint files that a rank reads, checked before any change: as saved, and of this model.

DeepSpeed 0.19.8 reads a file for each layer and a state file for each rank of a replica (``mp_rank``). If replicas
divide masters and moments, it also reads a file of each rank's parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn

from ds_terapipe import tensor_files
from ds_terapipe.bf16_parts import LoadArguments
from ds_terapipe.deepspeed_state import elements, elements_by_name, sizes_of
from ds_terapipe.errors import ConfigError
from ds_terapipe.manifest import Manifest
from ds_terapipe.model_chunks import ModelChunks, entries_on
from ds_terapipe.names import PLACED_STATE

KEY = "load_checkpoint"
_STATES = "mp_rank_*_model_states.pt"
_OF_STATES = ("module", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size")
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # each as large as its parameter, in any optimizer
_REWRITING = ("_load_from_state_dict", "load_state_dict")


class Share(NamedTuple):
    """A rank's part of a checkpoint.

    Attributes:
        entries: entries of the layer list.
        tensor: number of this rank among ``tensors`` tensor-parallel ones.
        model: number of this rank among ``models`` ranks of a replica, by which DeepSpeed names state files.
        data: number of this rank's replica, among ``replicas``.
    """

    entries: Sequence[int]
    tensor: int
    tensors: int
    model: int
    models: int
    data: int
    replicas: int

    @classmethod
    def of(cls, rank: int, topology: ProcessTopology, parts: Sequence[int], places: Sequence[int]) -> Share:
        """Return the share of a rank if the stages begin at the entries ``parts``; ``places``: as in `ModelChunks`."""
        at = topology.get_coord(rank)
        replica = sorted(topology.get_axis_list("data", at.data))
        tensors = max(topology.get_dim("model"), 1)
        return cls(
            entries_on(at.pipe, parts, places),
            getattr(at, "model", 0),
            tensors,
            replica.index(rank),
            len(replica),
            at.data,
            topology.get_dim("data"),
        )


class Wanted(NamedTuple):
    """States that are read beside the weights.

    Attributes:
        states: whether to read the optimizer's states, from the state file or from flat parts.
        parts: prefix of the names of files with flat parts; None without parts.
        scheduler: whether to read the scheduler's state.
        strict: whether layers must have the same weight names.
        optimizer: optimizer whose sizes the saved one must match; None: its shape will change.
        placed: stages and places now, as in `ModelChunks`.
    """

    states: bool
    parts: str | None
    scheduler: bool
    strict: bool
    optimizer: Any = None
    placed: Mapping[str, Any] | None = None


def wanted(engine: Any, given: LoadArguments) -> Wanted:
    """Return the states that an engine's ``load_checkpoint`` reads."""
    states = given.optimizer and engine.optimizer is not None
    in_parts = states and (engine.zero_optimization() or isinstance(engine.optimizer, BF16_Optimizer))
    parts = ("bf16_" if engine.bfloat16_enabled() else "") if in_parts else None
    placed = ModelChunks(engine.module).placed
    scheduler = given.scheduler and engine.lr_scheduler is not None
    return Wanted(states, parts, scheduler, bool(given.load_module_strict), engine.optimizer, placed)


def is_elsewhere(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint's stages were in other places, from its record; DeepSpeed's own has none."""
    if saved is None or now is None:
        return now is not None and now["places"] != sorted(set(now["places"]))
    return any(saved.get(key) != value for key, value in now.items())


class SavedFiles:
    """Files of a checkpoint.

    Args:
        folder: folder of the checkpoint.

    Raises:
        ConfigError: there is no such folder, or its manifest is damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"{KEY}: got {folder}, must be the folder of a checkpoint, use a tag that was saved (the file latest names one)"
            )
        self._folder = folder
        self._manifest = Manifest.of(KEY, folder)

    def check_bytes(self, names: Iterable[str]) -> None:
        """Refuse a file that is missing, or not as it was saved.

        Raises:
            ConfigError: naming the file.
        """
        paths = [self._folder / name for name in names]
        if self._manifest is not None:
            self._manifest.check(paths)
        for path in paths:
            if not path.is_file():
                raise ConfigError(f"{KEY}: got no {path}, must be there, use another checkpoint")

    def check_bytes_of(self, names: Iterable[str]) -> None:
        """Check optional files of a checkpoint, see :meth:`check_bytes`."""
        self.check_bytes(name for name in names if self._names(name))

    def check(self, share: Share, wants: Wanted, layers: Mapping[int, Any]) -> bool:
        """Refuse a share that is incomplete, or not of this model.

        Args:
            share: share of a rank.
            wants: states to read beside weights.
            layers: layers on this rank, by entry; of others only the files are checked.

        Returns:
            Whether the optimizer's state was saved with stages in other places; sizes are compared only if not.

        Raises:
            ConfigError: naming a file.
        """
        of_layers = dict(self._layer_files(share, layers))
        states, parts = self._state_file(share, wants.states), self._parts_files(share, wants.parts)
        self.check_bytes([*of_layers.values(), states, *parts])
        for entry, name in of_layers.items():
            if entry in layers:
                _check_layer(self._folder / name, layers[entry], wants.strict)
        found = self._check_states(self._folder / states, share, wants)
        elsewhere = wants.states and is_elsewhere(found.get(PLACED_STATE), wants.placed)
        if elsewhere:
            return True
        if wants.states and wants.parts is None and wants.optimizer is not None:
            path, saved = self._folder / states, found["optimizer"]
            _check_same(path, "parameter groups", elements(saved), elements(sizes_of(wants.optimizer)))
            _check_moments(path, saved, wants.optimizer)
        for path in map(self._folder.joinpath, parts):
            saved = _read(path, ["optimizer_state_dict"])["optimizer_state_dict"]
            if wants.optimizer is not None:
                live = elements_by_name(sizes_of(wants.optimizer))
                _check_same(path, "parts of parameters", elements_by_name(saved), live)
        return False

    def of_optimizer(self, share: Share, parts: str | None) -> str:
        """Return the name of the file with a rank's optimizer state; ``parts``: as in `Wanted`."""
        return self._state_file(share, own=True) if parts is None else self._parts_files(share, parts)[0]

    def _names(self, pattern: str) -> list[str]:
        """Return the names of a pattern, of existing and of saved files."""
        there = {path.name for path in self._folder.glob(pattern)}
        saved = [] if self._manifest is None else self._manifest.names()
        names = there.union(name for name in saved if Path(name).match(pattern))
        return sorted(names, key=lambda name: (len(name), name))  # mp_rank_100 follows mp_rank_99

    def _layer_files(self, share: Share, layers: Mapping[int, Any]) -> Iterator[tuple[int, str]]:
        for entry in share.entries:
            if entry in layers and not hasattr(layers[entry], "load_state_dict"):
                continue  # a function
            names = self._names(f"layer_{entry:02d}-*model_states.pt")
            if entry in layers and not names:
                raise ConfigError(
                    f"{KEY}: got no file of layer {entry} in {self._folder}, must be one of each layer, use a checkpoint of this "
                    "model"
                )
            if names and len(names) != share.tensors:
                raise ConfigError(
                    f"{KEY}: got {len(names)} files of layer {entry} in {self._folder}, must be one for each of {share.tensors} "
                    "tensor-parallel ranks, use as many ranks as it was saved with, or another checkpoint"
                )
            if names:
                yield entry, names[share.tensor]

    def _state_file(self, share: Share, own: bool) -> str:
        names = self._names(_STATES)
        if not names:
            raise ConfigError(
                f"{KEY}: got no {_STATES} in {self._folder}, must be the folder of a checkpoint, use a tag that was saved"
            )
        if own and len(names) != share.models:
            raise ConfigError(
                f"{KEY}: got {len(names)} files {_STATES} in {self._folder}, must be {share.models} (pipeline stages times "
                f"tensor-parallel ranks), use as many as it was saved with, or load_optimizer_states=False"
            )
        return names[share.model if len(names) == share.models else 0]

    def _parts_files(self, share: Share, beginning: str | None) -> list[str]:
        """Return the file of this rank's parts, if any is read."""
        if beginning is None:
            return []
        pattern = f"{beginning}zero_pp_rank_{share.data}_mp_rank_{share.model:02d}*optim_states.pt"
        if not self._names(pattern):
            raise ConfigError(
                f"{KEY}: got no {pattern} in {self._folder}, must have the optimizer's parts of every rank, use "
                "load_optimizer_states=False, or the stages, replicas and types that it was saved with"
            )
        return self._names(pattern)[:1]

    def _check_states(self, path: Path, share: Share, wants: Wanted) -> Mapping[str, Any]:
        states, names = _read(path, _OF_STATES), self._names(_STATES)
        if states["mp_world_size"] != len(names):
            raise _foreign(
                path, f"of a checkpoint with {states['mp_world_size']} {_STATES}", f"of one with {len(names)}"
            )
        if wants.parts is not None and states["dp_world_size"] != share.replicas:
            raise ConfigError(
                f"{KEY}: got {path} of {states['dp_world_size']} replicas, must be {share.replicas} as now for the optimizer's "
                "parts, use as many, or load_optimizer_states=False"
            )
        if wants.scheduler and states.get("lr_scheduler") is None:
            raise ConfigError(
                f"{KEY}: got {path} without the state of a scheduler, must have one, use load_lr_scheduler_states=False"
            )
        if wants.states and wants.parts is None and not isinstance(states.get("optimizer"), Mapping):
            raise ConfigError(
                f"{KEY}: got {path} without the optimizer's state, must have it, use load_optimizer_states=False, or the "
                "types that it was saved with"
            )
        return states


def _read(path: Path, keys: Iterable[str]) -> Mapping[str, Any]:
    """Return the content of a file that DeepSpeed has written."""
    found = tensor_files.read(KEY, path)
    missing = sorted(set(keys) - set(found)) if isinstance(found, Mapping) else ["states"]
    if missing:
        raise _foreign(path, f"without {', '.join(missing[:3])}", "a file of this checkpoint")
    return dict(found)


def _foreign(path: Path, got: str, must: str) -> ConfigError:
    return ConfigError(f"{KEY}: got {path} {got}, must be {must}, use a checkpoint of this model")


def _check_layer(path: Path, layer: nn.Module, strict: bool) -> None:
    """Refuse weights that ``layer.load_state_dict`` would refuse; a layer that rewrites them first is not checked."""
    saved, here = _read(path, ()), layer.state_dict()
    rewriting = _rewriting(layer) - {"torch"}
    if rewriting - {"megatron"}:
        return
    for name in sorted(here.keys() & saved.keys()):
        got, must = saved[name], here[name]
        if isinstance(must, Tensor) and getattr(got, "shape", None) != must.shape:
            raise _foreign(path, f"with {name} of shape {_shape(got)}", _shape(must))
    missing, unknown = here.keys() - saved.keys(), saved.keys() - here.keys()
    if strict and (missing or unknown) and not rewriting:
        got = f"without {min(missing)}" if missing else f"with {min(unknown)}"
        raise _foreign(path, got, "of the same layer")


def _shape(value: Any) -> str:
    return str(list(getattr(value, "shape", ("no tensor",))))


def _rewriting(layer: nn.Module) -> set[str]:
    """Return packages of hooks and methods that rewrite a layer's weights before loading them."""
    found: list[Any] = []
    for module in layer.modules():
        found += [
            getattr(type(module), name)
            for name in _REWRITING
            if getattr(type(module), name) is not getattr(nn.Module, name)
        ]
        found += module._load_state_dict_pre_hooks.values()
    return {getattr(one, "__module__", "").partition(".")[0] for one in found}


def _check_same(path: Path, what: str, saved: Any, live: Any) -> None:
    if saved is not None and live is not None and saved != live:
        raise _foreign(path, f"with other {what}", "of the same, on the same stages")


def _check_moments(path: Path, saved: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse moments of another shape than their parameter, which would fail at the next step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in saved.get("state", {}).items():
        for key in MOMENTS:
            shape = getattr(state.get(key), "shape", None)
            if shape is not None and shape != parameters[number].shape:
                raise _foreign(path, f"with {key} of shape {list(shape)}", _shape(parameters[number]))
