"""Checkpoints of an engine, read by parameter name where the stages were in other places when it was saved.

The files of DeepSpeed 0.19.8 tell the names themselves, of flat parts, or this package has recorded them. Parameters of a
torch optimizer that DeepSpeed's own engine has saved have numbers only: these follow the layer list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import PARAM_SHAPES, UNIVERSAL_CHECKPOINT_INFO

from ds_terapipe import tensor_files
from ds_terapipe.bf16_parts import LoadArguments
from ds_terapipe.deepspeed_state import elements, elements_by_name, load_scale
from ds_terapipe.elastic.moves.groups import has_one_count
from ds_terapipe.elastic.moves.masters import is_wrapped, replace
from ds_terapipe.elastic.moves.transfer import MASTER
from ds_terapipe.elastic.optimizer import keeps_matrices
from ds_terapipe.elastic.saved.as_plain import saved_as_plain
from ds_terapipe.elastic.saved.by_name import FLAT, WHOLE, layout_of
from ds_terapipe.elastic.saved.order import (
    Member,
    Members,
    counts_by_group,
    members_of,
    names_by_group,
    numbers_of,
    plain_members,
    stage_members,
)
from ds_terapipe.elastic.saved.restore import SavedStates
from ds_terapipe.elastic.saved.universal import (
    CARRIED,
    KEY as UNIVERSAL,
    Universal,
    groups_filled,
    info,
    kind_of,
    to_carry,
    untrained,
)
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.job import Job
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.names import PLACED_STATE
from ds_terapipe.pipeline.checkpoints import Checkpointer, Names
from ds_terapipe.pipeline.controller import Controller
from ds_terapipe.pipeline.ended import poison_on_error
from ds_terapipe.pipeline.parameter_groups import check_inside, drop_unused, make_alike, settings_of
from ds_terapipe.pipeline.saved_files import KEY, SavedFiles, Share, Wanted
from ds_terapipe.pipeline.transport.consensus import Consensus


class NamedCheckpointer(Checkpointer):
    """Reads the optimizer's state by name if it was not saved on these stages, and saves that of a plain pipeline."""

    @property
    def frozen_by_policy(self) -> Collection[str]:
        """Names of parameters that a policy has frozen, on any rank: saved with ``exclude_frozen_parameters`` too."""
        return ()

    def state(self, engine: Any) -> dict[str, Any] | None:
        """Return what a universal checkpoint holds beside tensors; collective."""
        return None

    def prepare(self, engine: Any, state: Any) -> None:
        """Prepare an engine for a universal checkpoint with this state, None without one; collective."""

    def load_state(self, engine: Any, state: Any) -> None:
        """Restore what :meth:`state` has returned, or begin without; collective."""

    def client_state(self, engine: Any, names: Names, frozen: bool) -> dict[str, Any]:
        """Return facts that `ds_to_universal` needs, for the files that it copies; collective."""
        if layout_of(engine) != FLAT:
            return {}
        sharded = engine.grid.model_parallel_size > 1
        kinds = {n: kind_of(p, sharded) for n, p in engine.module.named_parameters() if p.requires_grad}
        said = info(self._consensus.gather((engine.grid.get_stage_id(), kinds, names)))
        state = self.state(engine)
        carried = to_carry(engine, state, said, frozen and state is not None, self.frozen_by_policy)
        if carried and not engine.zero_optimization():
            carried[PARAM_SHAPES] = engine._get_zero_param_shapes()  # DeepSpeed adds them only with ZeRO
        return carried

    def load(self, engine: Any, load: Callable[..., Any], given: LoadArguments) -> Any:
        """Load a checkpoint, also the output of `ds_to_universal`, which goes into the present shape.

        Raises:
            ConfigError: on every rank; of a universal checkpoint only the frozen layers may have been changed.
        """
        if not engine.load_universal_checkpoint():
            path, client_state = super().load(engine, load, given)
            return path, users(client_state)
        universal = self.on_all(lambda: _read_universal(engine, given))
        self.prepare(engine, universal.state)
        wanted = untrained(engine.module) if given.load_module_strict else {}
        self._consensus.together(lambda: universal.check(numbers_of(engine), wanted))
        zero = engine.zero_optimization()
        with groups_filled(engine, universal.folder):
            kept = LoadArguments(given.load_dir, given.tag, load_lr_scheduler_states=given.load_lr_scheduler_states)
            path, client_state = self.load_checked(engine, load, kept._replace(load_optimizer_states=zero))
            if not zero:  # BF16_Optimizer could, but DeepSpeed asks for ZeRO
                engine._load_zero_checkpoint(given.load_dir, universal.folder.name)
        if not zero:
            engine.optimizer.update_lp_params()
        universal.fill(engine.module, engine.grid.get_slice_parallel_rank(), engine.grid.model_parallel_size)
        self.load_state(engine, universal.state)
        return path, users(client_state)

    @contextmanager
    def as_saved(self, engine: Any) -> Iterator[dict[str, Any]]:
        """Context manager in which the optimizer's state is that of this rank's files; collective."""
        if engine.basic_optimizer is None or not ModelChunks(engine.module).is_placed:
            with super().as_saved(engine) as placed:
                yield placed
            return
        with saved_as_plain(engine, self._consensus) as names:
            yield {"names": names}  # of no stages here: loaded by name

    def check(self, engine: Any, folder: Path, wants: Wanted) -> Callable[[], None] | None:
        """Check the files that are about to be read; return what loads the optimizer's state, None: DeepSpeed does."""
        chunks, topology = ModelChunks(engine.module), engine.module._topo
        if not self.check_files(engine, folder, topology, chunks.parts, chunks.places, wants):
            return None
        members = members_of(engine, self._consensus.gather)
        # every file is some rank's own, and has been checked
        parts = self.on_all(lambda: _parts_in(engine, SavedFiles(folder), folder, wants, members))
        return partial(put, engine, self.read_named(engine, folder, parts), wants.scheduler)

    def read_named(self, engine: Any, folder: Path, parts: Sequence[Mapping[str, Any] | None]) -> SavedStates:
        """Read the optimizer's new state before anything is changed; collective. ``parts``: as for `SavedStates`."""
        module, optimizer, gather = engine.module, engine.basic_optimizer, self._consensus.gather
        if keeps_matrices(engine, optimizer):
            raise ConfigError(
                f"load_checkpoint: got {folder} of other stages or places, must be of the same for Muon beside zero_optimization "
                "(DeepSpeed keeps its momentum as whole matrices), use the layout that saved it, or load_optimizer_states=False"
            )
        if not is_wrapped(engine.optimizer):
            check_inside(
                optimizer, module, engine.param_names, gather, "to read a checkpoint of other stages or places"
            )
        mine, parameters = numbers_of(engine), dict(module.named_parameters())
        trained = {name: p for name, p in parameters.items() if p.requires_grad and name in mine}
        number_of: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for numbers, of_rank in gather((mine, {name: p.numel() for name, p in parameters.items()})):
            number_of |= numbers
            sizes |= of_rank
        check_kinds(engine, parts)
        rank, groups = engine.grid.get_slice_parallel_rank(), len(optimizer.param_groups)
        levels = has_one_count(optimizer)
        return self.on_all(lambda: SavedStates(folder, parts, rank, groups, number_of, trained, sizes, levels))


class PlacedController(Controller):
    """Controller of an engine whose model and placement stay, whatever the placement of its checkpoints."""

    def arrange_groups(self, engine: Any, optimizer: Any, kind: str | None) -> None:
        """Arrange the parameter groups; several stages on a place are saved as others, so all ranks get the same groups."""
        super().arrange_groups(engine, optimizer, kind)
        if ModelChunks(engine.module).is_placed:
            if keeps_matrices(engine, optimizer):
                must = "another beside zero_optimization and stages_per_place (DeepSpeed keeps its momentum as whole matrices)"
                raise bad_value(
                    "optimizer.type", type(optimizer).__name__, must, 'e.g. "AdamW", or zero_optimization.stage 0'
                )
            drop_unused(optimizer, engine.param_names)
            make_alike(optimizer, engine.client_lr_scheduler, Job.current().gather)

    def new_checkpointer(self, consensus: Consensus) -> Checkpointer:
        """Return what saves checkpoints, and loads those of any placement."""
        return NamedCheckpointer(consensus)


def _read_universal(engine: Any, given: LoadArguments) -> Universal:
    if layout_of(engine) != FLAT:
        raise bad_value(UNIVERSAL, True, "false without bf16 or ZeRO-1", '"zero_optimization": {"stage": 1}')
    if not given.optimizer:
        raise ConfigError(
            "load_checkpoint: got load_module_only or no optimizer states beside checkpoint.load_universal, must be the "
            "whole training, use a checkpoint that is not converted"
        )
    universal = Universal(given.load_dir, given.tag)
    if not (universal.folder / "zero").is_dir():
        raise ConfigError(f"{UNIVERSAL}: got {universal.folder}, must be an output folder of ds_to_universal, use one")
    return universal


def users(client_state: Any) -> Any:
    """Return the user's part of a client state."""
    if client_state and client_state.pop(CARRIED, None) is not None:
        client_state.pop(UNIVERSAL_CHECKPOINT_INFO, None)
    return client_state


def check_kinds(engine: Any, parts: Sequence[Mapping[str, Any] | None]) -> None:
    """Refuse states of another precision than this engine's; in fp32, ZeRO-1 may be on or off.

    Raises:
        ConfigError: on every rank.
    """
    now, then = layout_of(engine), {part["kind"] for part in parts if part is not None}
    rounded = engine.bfloat16_enabled() or engine.fp16_enabled()
    if then != {now} and (rounded or WHOLE in then):
        raise bad_value(
            f"{KEY}: optimizer", "states of another precision", "of the same as now", "the same types and ZeRO"
        )


def put(engine: Any, saved: SavedStates, scheduler: bool) -> None:
    """Replace the optimizer's states by these; ``scheduler``: the scheduler's state was loaded from the checkpoint."""
    with poison_on_error(engine._watchdog):
        wrapper, optimizer, module = engine.optimizer, engine.basic_optimizer, engine.module
        if is_wrapped(wrapper):
            _put_wrapped(wrapper, module, saved)
        else:
            _put_plain(optimizer, module, saved)
        groups = optimizer.param_groups
        if scheduler and hasattr(engine.lr_scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
            # torch's schedulers have lists by group, loaded in the checkpoint's order
            engine.lr_scheduler.base_lrs = [group["initial_lr"] for group in groups]
            engine.lr_scheduler._last_lr = [group["lr"] for group in groups]


def _put_plain(optimizer: torch.optim.Optimizer, module: torch.nn.Module, saved: SavedStates) -> None:
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters():
        if (master := saved.states.get(name, {}).pop(MASTER, None)) is not None:
            parameter.data.copy_(master)
    state: dict[int, Any] = {}
    param_groups: list[dict[str, Any]] = []
    start = 0
    for group, settings in zip(optimizer.param_groups, saved.settings, strict=True):
        names = [name_of.get(id(parameter), "") for parameter in group["params"]]
        state |= {number: saved.states[name] for number, name in enumerate(names, start) if name in saved.states}
        beside = {key: value for key, value in group.items() if key not in settings_of(group)}
        param_groups.append({**settings, **beside, "params": list(range(start, start + len(names)))})
        start += len(names)
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _put_wrapped(wrapper: Any, module: torch.nn.Module, saved: SavedStates) -> None:
    optimizer = wrapper.optimizer
    if saved.scale:  # without ZeRO there was none, and the fp32 weights are the masters
        load_scale(wrapper, saved.scale)
    parameters = dict(module.named_parameters())
    replace(wrapper, {id(parameters[name]): state for name, state in saved.states.items()})
    for group, settings in zip(optimizer.param_groups, saved.settings, strict=True):
        group.update({key: value for key, value in settings.items() if key in group})


# ------------------------------------------------------------------------------------------------------ names in the files


def _parts_in(engine: Any, files: SavedFiles, folder: Path, wants: Wanted, members: Members) -> list[dict[str, Any]]:
    """Return what `about` notes of this tensor-parallel rank's parts, from the files of a checkpoint of this topology.

    Raises:
        ConfigError: a file is damaged or missing, or DeepSpeed's numbers do not fit the layers.
    """
    chunks, topology, kind = ModelChunks(engine.module), engine.module._topo, layout_of(engine)
    found: list[dict[str, Any]] = []
    counts: list[list[int]] = []
    for rank in range(topology.world_size()):
        share, at = Share.of(rank, topology, chunks.parts, chunks.places), topology.get_coord(rank)
        if share.tensor != engine.grid.get_slice_parallel_rank() or (kind != FLAT and share.data):
            continue
        name = files.of_optimizer(share, wants.parts)
        saved = tensor_files.read(KEY, folder / name)
        record = saved.get(PLACED_STATE) or {}
        groups = record.get("names")
        if kind == FLAT:
            groups = [list(names) for names in elements_by_name(saved["optimizer_state_dict"]) or ()]
        else:
            counts.append(elements(saved["optimizer"]) or [])
        found.append(
            {"kind": kind, "stage": at.pipe, "data": share.data, "tensor": share.tensor, "file": name, "groups": groups}
        )
    if any(part["groups"] is None for part in found):
        joined, stages = is_wrapped(engine.optimizer), plain_members(chunks, members)
        here = [counts_by_group(of_stage, len(each), joined) for of_stage, each in zip(stages, counts, strict=True)]
        if here != counts:
            stages = _in_order(folder, counts, chunks, members, joined)
        for part, of_stage, each in zip(found, stages, counts, strict=True):
            part["groups"] = names_by_group(of_stage, len(each))
    return found


def _in_order(
    folder: Path, counts: Sequence[Sequence[int]], chunks: ModelChunks, members: Members, joined: bool
) -> list[list[Member]]:
    """Return the parameters of each stage if the stages divide the layer list, as in DeepSpeed's own engine.

    Args:
        folder: for the error.
        counts: of each stage the parameters in its groups, or their elements.
        chunks: the layer list.
        members: the optimizer's parameters.
        joined: whether elements are counted.

    Raises:
        ConfigError: the counts are not those of any such stages.
    """
    found, start = [], 0
    for of_stage in counts:
        stop, here = start, stage_members((), chunks, members)
        while (now := counts_by_group(here, len(of_stage), joined)) != list(of_stage):
            if stop == len(chunks.specs) or any(some > most for some, most in zip(now, [*of_stage, 0], strict=False)):
                must = "of the same parameters as there are now, in the order of the layers"
                raise bad_value(
                    f"{KEY}: optimizer", f"other parameter groups in {folder}", must, "load_optimizer_states=False"
                )
            stop += 1
            here = stage_members(range(start, stop), chunks, members)
        found.append(here)
        start = stop
    return found
