"""Layers of a live ``PipelineModule``, by the entries of its layer list: extracted, built and reassembled.

A ``loss_fn`` that is a module is an additional layer after the last entry.
"""

from __future__ import annotations

import copy
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology
from torch import Tensor, nn

from ds_terapipe.model_chunks import PLACES, ModelChunks, elsewhere
from ds_terapipe.overrides import replaced
from ds_terapipe.pipeline.operators.random_streams import TorchStates
from ds_terapipe.skip_init import skipping_init

LOSS = "loss_fn."  # prefix of the names of the loss's own tensors, if it is a module


def modules_here(module: PipelineModule) -> dict[str, nn.Module]:
    """Return this rank's layers by prefix; on the last stage with the loss, if that is a module."""
    here = ModelChunks(module).layers
    if isinstance(module.loss_fn, nn.Module) and not copies(module):
        here[LOSS] = module.loss_fn
    return here


def copies(module: PipelineModule) -> tuple[str, ...]:
    """Return prefixes of the names of tensors that this rank holds as an unused copy."""
    return () if ModelChunks(module).has_last else (LOSS,)


def leave_loss(module: PipelineModule) -> None:
    """Freeze the copy of the loss on ranks without the model's last stage."""
    of_layers = {id(parameter) for layer in ModelChunks(module).layers.values() for parameter in layer.parameters()}
    for name, parameter in module.named_parameters():
        if name.startswith(copies(module)) and id(parameter) not in of_layers:
            parameter.requires_grad_(False)


def layers_for(
    module: PipelineModule, entries: Sequence[int], device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, nn.Module]:
    """Return the layers of these entries: live modules that are here already, the others newly built, of ``dtype``.

    The caller overwrites the values of the built ones. The process's random states stay as they are.
    """
    chunks, here, found = ModelChunks(module), modules_here(module), {}
    with random_states_kept(device):
        for entry in entries:
            prefix, spec = chunks.prefix(entry), chunks.specs[entry]
            if prefix in found or not isinstance(spec, (LayerSpec, nn.Module)):
                continue
            same = chunks.builder(prefix) == entry
            found[prefix] = here[prefix] if prefix in here and same else build(spec, device, dtype)
    if isinstance(module.loss_fn, nn.Module) and len(chunks.specs) - 1 in entries:
        found[LOSS] = module.loss_fn
    return found


def build(spec: LayerSpec | nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a layer from its spec, in ``dtype`` if given; a module in place of a spec gets empty tensors."""
    if isinstance(spec, LayerSpec):
        with skipping_init():
            built: nn.Module = spec.build().to(device, dtype)
        return built
    for tensor in _tensors(spec):
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        tensor.data = torch.empty(tensor.shape, dtype=kind, device=device)
    return spec


def structure_of(spec: LayerSpec, live: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a layer as another rank would, for inspection; modules shared with the live layer stay as they are."""
    with skipping_init():
        built: nn.Module = spec.build()
    alive = set(map(id, _tensors(live)))
    return built if any(id(tensor) in alive for tensor in _tensors(built)) else built.to(dtype=dtype)


def drop_copies(module: PipelineModule, left: Iterable[nn.Module] = ()) -> None:
    """Free the values of modules that are not on this rank: modules in place of specs, and ``left`` layers.

    Their structure stays, also of shared weights: one element stands for all of a tensor. Tensors still used here are
    kept.
    """
    kept = {id(tensor) for tensor in _tensors(module)}
    chunks = ModelChunks(module)
    away = [spec for entry, spec in enumerate(chunks.specs) if entry not in chunks.entries]
    for layer in (*(spec for spec in away if isinstance(spec, nn.Module)), *left):
        for tensor in _tensors(layer):
            if id(tensor) not in kept:
                tensor.data, tensor.grad = tensor.new_zeros(()).expand(tensor.shape), None


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


def reassemble(
    module: PipelineModule,
    topology: ProcessTopology,
    parts: Sequence[int],
    places: Sequence[int],
    layers: Mapping[str, nn.Module],
) -> None:
    """Convert a live ``PipelineModule`` to another topology or placement, from existing layers; collective.

    Args:
        module: keeps its identity, settings, hooks and its group of all ranks, and its grid if the topology stays. The
            caller closes the groups of an old grid, and of its tied layers.
        topology: of all ranks.
        parts: first entry of each stage, and the number of entries.
        places: place of each stage.
        layers: this rank's layers from `layers_for`.
    """
    for name in list(module.fwd_map):
        del module._modules[name]
    if topology is not module._topo:
        module._topo, module.num_stages = topology, max(topology.get_dim("pipe"), 1)
        module._grid = PipelineParallelGrid(process_group=module.world_group, topology=topology)
        module.stage_id = topology.get_coord(module.global_rank).pipe
    _bound(module, list(parts), places)
    module.forward_funcs, module.fwd_map, module.tied_weight_attrs = [], {}, {}
    module.tied_modules = nn.ModuleDict()
    module.is_checkpointable_results, module.is_checkpointable_results_interval = [], None
    here = ModelChunks(module).entries
    stand_ins = [
        _stand_in(module, entry, spec, layers) if entry in here else elsewhere
        for entry, spec in enumerate(module._layer_specs)
    ]
    with replaced(module, _layer_specs=stand_ins, seed_layers=False):  # no random numbers are drawn
        module._build()
    module.tied_comms = module._index_tied_modules()


def _bound(module: PipelineModule, parts: list[int], places: Sequence[int]) -> None:
    """Set the range that DeepSpeed builds, and the place of each entry; see `ModelChunks`."""
    module.parts = parts
    if list(places) == list(range(len(parts) - 1)):
        for name in (PLACES, "stage_owner"):  # of a placement before
            vars(module).pop(name, None)
        module._set_bounds(start=parts[module.stage_id], stop=parts[module.stage_id + 1])
        return
    setattr(module, PLACES, tuple(places))
    module._set_bounds(start=0, stop=len(module._layer_specs))
    module.stage_owner = partial(_owner, parts, tuple(places))


def _owner(parts: Sequence[int], places: Sequence[int], layer_idx: int) -> int:
    """Return the place of an entry; in place of ``PipelineModule.stage_owner``."""
    return places[bisect_right(parts, layer_idx) - 1]


def _stand_in(module: PipelineModule, entry: int, spec: Any, layers: Mapping[str, nn.Module]) -> Any:
    """Return what ``PipelineModule._build`` gets for an entry: its layer if there is one, else the spec."""
    layer = layers.get(ModelChunks(module).prefix(entry))
    if layer is None or not isinstance(spec, LayerSpec):
        return spec
    if not isinstance(spec, TiedLayerSpec):
        return layer
    built = copy.copy(spec)
    built.build = lambda log=False: layer
    return built


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Context manager that restores the states of all random generators, Megatron's included."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), TorchStates(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        of_torch.restore()


def names_in(module: PipelineModule, entries: Iterable[int]) -> tuple[str, ...]:
    """Return the prefixes of the names of these entries' parameters."""
    chunks = ModelChunks(module)
    return tuple(dict.fromkeys(chunks.prefix(entry) for entry in entries))
