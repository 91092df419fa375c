"""Reshape of a module and its optimiser, on all ranks together.

Nothing is changed before every rank has built its new layers and checked that nothing would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn

from ds_terapipe.elastic.moves import attributes
from ds_terapipe.elastic.moves.groups import refill
from ds_terapipe.elastic.moves.layers import (
    LOSS,
    copies,
    drop_copies,
    layers_for,
    leave_loss,
    modules_here,
    random_states_kept,
    reassemble,
    structure_of,
)
from ds_terapipe.elastic.moves.rebuild import quietly
from ds_terapipe.elastic.moves.shares import Bucket
from ds_terapipe.elastic.moves.transfer import (
    MASTER,
    StageState,
    TensorInfo,
    authority,
    check_same,
    check_structure,
    sent_of,
    stage_state,
)
from ds_terapipe.elastic.optimizer import layer_dtype
from ds_terapipe.elastic.policies.resize import POLICY
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.model_chunks import ModelChunks, entries_on
from ds_terapipe.pipeline.parameter_groups import settings_of
from ds_terapipe.pipeline.tied import tie_all
from ds_terapipe.pipeline.transport.boundary import raw
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.pipeline.transport.watchdog import Watchdog


@dataclass(frozen=True)
class RankReport:
    """The message of one rank of the first replica to all others."""

    stage: int
    tensor: int
    state: StageState
    settings: Sequence[tuple[dict[str, Any], bool]]  # of each parameter group, and whether it has parameters here


def check_movable(engine: Any) -> None:
    """Refuse live layers that another rank could not build, and a topology in which ranks would change their shards.

    Raises:
        ConfigError: naming the axes, or parts that a spec does not build; or the optimiser is missing.
    """
    module, optimizer = engine.module, engine.basic_optimizer
    if optimizer is None:
        rule = "one beside elastic_pipeline.resize.policy or partition"
        raise bad_value("optimizer", None, rule, "an optimizer, or a configuration without them")
    axes = module._topo.get_axis_names()
    if module._topo.get_dim("model") > 1 and axes[-1] != "model":
        got, use = ", ".join(axes), "deepspeed.runtime.pipe.topology.PipeModelDataParallelTopology"
        raise bad_value("elastic_pipeline.resize.policy: topology", got, 'axes of which the last is "model"', use)
    chunks = ModelChunks(module)
    here = chunks.layers
    mine = stage_state(here, optimizer)
    for prefix in here:
        spec = next(chunks.specs[entry] for entry in chunks.entries if chunks.prefix(entry) == prefix)
        if isinstance(spec, LayerSpec):
            with random_states_kept(engine.device):
                check_structure(prefix, structure_of(spec, here[prefix], layer_dtype(engine)), mine)


class Reshape:
    """Moves the layers and optimiser state of a live module to the ranks of another shape or placement.

    Args:
        module: the module, which keeps its identity.
        optimizer: the torch optimiser of its parameters, or an object with its attributes; it keeps its identity too.
        consensus: consensus of the job.
        device: device of the layers.
        dtype: type of the layers; None: the one in which they are built.
        key: beginning of the error message.
    """

    def __init__(
        self,
        module: PipelineModule,
        optimizer: Any,
        consensus: Consensus,
        device: torch.device,
        dtype: torch.dtype | None = None,
        key: str = POLICY,
    ) -> None:
        self._module, self._optimizer, self._consensus = module, optimizer, consensus
        self._device, self._dtype, self._key = device, dtype, key
        self._watchdog: Watchdog = consensus.watchdog
        self._wait = self._watchdog.wait_on_host
        self._rank, self._old = module.global_rank, module._topo
        self._here, self._chunks = modules_here(self._module), ModelChunks(self._module)
        self._tied = {self._chunks.prefix(e) for e, s in enumerate(self._chunks.specs) if isinstance(s, TiedLayerSpec)}
        self._live: dict[str, Tensor] = {}
        self._rooms: dict[str, list[Tensor]] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._layers: dict[str, nn.Module] = {}
        self.sent_bytes = 0

    def prepare(self, topology: ProcessTopology, parts: Sequence[int], places: Sequence[int]) -> None:
        """Build this rank's layers for other entries, and another topology or placement; collective.

        Args:
            topology, parts, places: as for `reassemble`.

        Raises:
            ConfigError: on every rank, if something would be lost; nothing has been changed.
        """
        self._topology, self._parts, self._places = topology, parts, places
        said = self._gather()
        self._consensus.together(lambda: _settings(said))
        held, place = _held(said), topology.get_coord(self._rank).pipe
        entries = entries_on(place, parts, places)
        # an error of a user's layer must not leave the others waiting
        self._consensus.together(lambda: self._build(held, entries))

    def run(self, bucket: Bucket | None = None) -> None:
        """Change to the shape of :meth:`prepare`; collective. ``bucket``: carries what is in host memory."""
        said, layers, stage = self._gather(), self._layers, self._old.get_coord(self._rank).pipe
        held = _held(said)
        self._live = {prefix + name: t for prefix, layer in self._here.items() for name, t in _tensors(layer)}
        owner = {name: authority(name, held) for prefix in layers for name in self._names(prefix, layers[prefix], held)}
        lacking = [name for name, of in owner.items() if of != stage]
        for name in lacking:
            self._make_room(name, held[owner[name]].tensors[name])
        self._carry(held, lacking, bucket)
        for prefix, layer in layers.items():
            if layer is not self._here.get(prefix):
                _set_up(prefix, layer, held)
        self._carry_attributes(held)
        for name, of in owner.items():
            self._fill(name, layers, held[of].tensors[name], received=of != stage)
        with quietly(), self._watchdog.making_groups():
            reassemble(self._module, self._topology, self._parts, self._places, layers)
            tie_all(self._module, self._consensus.gather)
        leave_loss(self._module)
        drop_copies(self._module, [layer for prefix, layer in self._here.items() if layers.get(prefix) is not layer])
        groups = {
            name: info.group for each in held.values() for name, info in each.tensors.items() if info.is_parameter
        }
        groups |= {name: held[of].tensors[name].group for name, of in owner.items()}
        away = copies(self._module)
        wanted = {name: number for name, number in groups.items() if number is not None and not name.startswith(away)}
        refill(self._optimizer, self._module, wanted, self._states, _settings(said))

    def _gather(self) -> list[RankReport]:
        """Gather the layers and settings of the stages with this rank's tensor-parallel index; collective."""
        coordinates, mine = self._old.get_coord(self._rank), None
        tensor = getattr(coordinates, "model", 0)
        if getattr(coordinates, "data", 0) == 0:
            settings = [(settings_of(group), bool(group["params"])) for group in self._optimizer.param_groups]
            state = stage_state(self._here, self._optimizer, sorted(self._tied))
            mine = RankReport(coordinates.pipe, tensor, state, settings)
        said = [one for one in self._consensus.gather(mine) if one is not None and one.tensor == tensor]
        return sorted(said, key=lambda one: one.stage)

    def _build(self, held: Mapping[int, StageState], entries: Sequence[int]) -> None:
        """Build the layers of some entries, and check that the live ones lose nothing."""
        self._layers = layers = layers_for(self._module, entries, self._device, self._dtype)
        now = {place: entries_on(place, self._chunks.parts, self._chunks.places) for place in held}
        for prefix, layer in layers.items():
            if layer is self._here.get(prefix):
                continue
            same = [_stage_with(prefix, held)]
            if prefix != LOSS:
                # entries of a tied layer may build it differently: only builds of the same entry are comparable
                entry = self._chunks.builder(prefix, entries)
                same = [s for s in held if self._chunks.builder(prefix, now[s]) == entry]
            if same:
                check_structure(prefix, layer, held[same[0]], self._key)
        for each in held.values():
            check_same(layers, each, self._key)

    def _names(self, prefix: str, layer: nn.Module, held: Mapping[int, StageState]) -> list[str]:
        """Return the names of a layer's tensors; for a newly built layer those of the live one."""
        names = [prefix + name for name, _ in _tensors(layer)]
        if layer is self._here.get(prefix):
            return names
        known = {name for each in held.values() for name in each.tensors}
        if prefix in self._tied:
            return [name for name in names if name in known]
        return [name for name in held[_stage_with(prefix, held)].tensors if name.startswith(prefix)]

    def _carry(self, held: Mapping[int, StageState], lacking: Sequence[str], bucket: Bucket | None) -> None:
        """Do all ranks' transfers in one order: each waits for its first unfinished one, so they cannot deadlock."""
        asked: dict[str, int] = {}
        for target, names in enumerate(self._consensus.gather(lacking)):
            for name in names:
                asked[name] = asked.get(name, -1) + 1
                source = self._holder(authority(name, held), target, asked[name])
                if self._rank == source:
                    live = self._live[name]
                    values = [live, *sent_of(self._optimizer.state.get(live, {})).values()]
                    for part, message, group in self._messages(values, bucket):
                        if message is not part:
                            message.copy_(part)
                        self._wait(
                            torch.distributed.isend(message, target, group=group), f"rank {target} to take {name}"
                        )
                        self.sent_bytes += message.nbytes
                elif self._rank == target:
                    for part, message, group in self._messages(self._rooms[name], bucket):
                        self._wait(torch.distributed.irecv(message, source, group=group), f"{name} from rank {source}")
                        if message is not part:
                            part.copy_(message)

    def _carry_attributes(self, held: Mapping[int, StageState]) -> None:
        """Give newly built layers the tensors that are plain attributes of the live ones; collective."""
        coordinates = self._old.get_coord(self._rank)
        tensor, gather = getattr(coordinates, "model", 0), self._consensus.gather
        new = {prefix: layer for prefix, layer in self._layers.items() if layer is not self._here.get(prefix)}
        live = {
            name: about["tensors"]
            for stage in sorted(held, reverse=True)
            for name, about in held[stage].modules.items()
        }
        lacking = attributes.differing(new, live, tensor)
        asked = sorted({place for of_rank in gather(lacking) for place in of_rank})
        if asked:
            mine = attributes.values_of(self._here, asked, tensor) if getattr(coordinates, "data", 0) == 0 else {}
            # of a tied layer's copies the first stage's counts
            values = {place: value for of_rank in reversed(gather(mine)) for place, value in of_rank.items()}
            attributes.put(new, {place: values[place] for place in lacking}, self._device)

    def _holder(self, stage: int, target: int, turn: int) -> int:
        """Return the rank of a stage that sends to a target; replicas take turns."""
        replicas = max(self._old.get_dim("data"), 1)
        where = {**self._old.get_coord(target)._asdict(), "pipe": stage}
        if "data" in where:
            where["data"] = turn % replicas
        return int(self._old.get_rank(**where))

    def _messages(self, tensors: Sequence[Tensor], bucket: Bucket | None) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Yield parts of tensors, with the memory of their messages and the group."""
        for tensor in tensors:
            flat = raw(tensor)
            if flat.device == self._device or bucket is None:
                yield flat, flat, self._consensus.job.group
            else:
                yield from bucket.messages(flat.view(-1))

    def _make_room(self, name: str, info: TensorInfo) -> None:
        moments = {}
        for key, kind in info.moments.items():
            on_host = MASTER in info.moments and kind.shape == info.kind.shape  # as `masters.join` leaves it
            moments[key] = torch.empty(kind.shape, dtype=kind.dtype, device="cpu" if on_host else self._device)
        values = torch.empty(info.kind.shape, dtype=info.kind.dtype, device=self._device)
        self._rooms[name] = [values, *(moments[key] for key in sorted(moments))]
        if moments or info.values:
            # step counts first, in the optimisers' order: checkpoints do not depend on moves
            self._states[name] = {**attributes.to_device(dict(info.values), self._device), **moments}

    def _fill(self, name: str, layers: Mapping[str, nn.Module], info: TensorInfo, received: bool) -> None:
        """Set a tensor of the new layers from the received values, or from the live tensor that it replaces."""
        prefix = next(prefix for prefix in layers if name.startswith(prefix))
        layer, path = layers[prefix], name.removeprefix(prefix)
        if received:
            values = self._rooms[name][0]
        elif layer is self._here.get(prefix):
            return
        else:
            live = self._live[name]
            values = live.data
            state = self._optimizer.state.get(live)
            if state:
                self._states[name] = state
        owner, _, leaf = path.rpartition(".")
        holder = layer.get_submodule(owner)
        if not info.is_parameter:
            built = holder._buffers.get(leaf)
            if built is not None and (built.dtype, built.device) == (values.dtype, values.device):
                built.data = values  # it may have a second name, as an attribute or in another module
            else:
                holder._buffers[leaf] = values
            return
        parameter = holder._parameters[leaf]
        assert parameter is not None
        parameter.data = values
        parameter.requires_grad_(info.requires_grad)
        vars(parameter).update(info.attributes)


def _held(said: Sequence[RankReport]) -> dict[int, StageState]:
    return {one.stage: one.state for one in said}


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()


def _stage_with(prefix: str, held: Mapping[int, StageState]) -> int:
    return next(stage for stage, each in held.items() if prefix in each.modules)


def _settings(said: Sequence[RankReport]) -> list[dict[str, Any]]:
    """Return the settings of each group from a stage with parameters of it: a step count may be among them.

    Raises:
        ConfigError: they differ between stages, as after a change on some ranks: no group could have both.
    """
    found = []
    for number, of_stages in enumerate(zip(*(one.settings for one in said), strict=True)):
        first, *others = [(one.stage, each[0]) for one, each in zip(said, of_stages, strict=True) if each[1]] or [
            (0, of_stages[0][0])
        ]
        for stage, settings in others:
            key = next((key for key, value in settings.items() if repr(value) != repr(first[1].get(key))), None)
            if key is not None:
                raise ConfigError(
                    f"optimizer: got {key} {first[1].get(key)!r} in group {number} on stage {first[0]} and {settings[key]!r} on "
                    f"stage {stage}, must be the same on all stages where layers move, use groups that differ from the start"
                )
        found.append(first[1])
    return found


def _set_up(prefix: str, layer: nn.Module, held: Mapping[int, StageState]) -> None:
    """Copy the live layer's plain attributes to the modules of a newly built layer."""
    about = held[_stage_with(prefix, held)].modules
    for name, module in layer.named_modules():
        live = about.get(prefix + name, {})
        module._non_persistent_buffers_set.update(live.get("unsaved", ()))  # some are made by the first forward
        for key, value in live.get("settings", {}).items():
            if key not in vars(module) or vars(module)[key] != value:
                setattr(module, key, value)
