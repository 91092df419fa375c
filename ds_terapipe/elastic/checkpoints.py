"""Checkpoints of an elastic engine: loaded in their own shape, or by parameter name into another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed.checkpoint.constants import PARAM_SHAPES, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_terapipe.elastic.caching import Caching
from ds_terapipe.elastic.moves.groups import level_steps
from ds_terapipe.elastic.moves.masters import is_wrapped, unwrap
from ds_terapipe.elastic.saved.restore import SavedStates, about, numbers_of, put, read_by
from ds_terapipe.elastic.saved.state import check, read_checked, same_shape, write
from ds_terapipe.elastic.saved.universal import (
    CARRIED,
    KEY,
    Universal,
    groups_filled,
    info,
    kind_of,
    to_carry,
    untrained,
)
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.pipeline.parameter_groups import check_inside
from ds_terapipe.pipeline.resuming import resuming
from ds_terapipe.pipeline.saved_files import Wanted, wanted
from ds_terapipe.pipeline.transport.consensus import error_of


class ElasticCheckpoints(Caching):
    """Part of the engine: saves frozen layers, the shape and the policy's state with a checkpoint."""

    _seed: int | None = None  # seed of the random streams

    def _save_beside(self, folder: Path) -> None:
        level_steps(self.basic_optimizer)  # a later load may read them by name
        parts = self._consensus.gather(about(self))
        state = {**self._state(), "optimizer": parts}
        self._consensus.decide(lambda: write(folder, state))

    def _client_state(self) -> dict[str, Any]:
        """Return facts that `ds_to_universal` needs, for the files that it copies."""
        if not is_wrapped(self.optimizer) or self.fp16_enabled():
            return {}
        sharded = self.grid.model_parallel_size > 1
        kinds = {n: kind_of(p, sharded) for n, p in self.module.named_parameters() if p.requires_grad}
        carried = to_carry(self, self._state(), info(self._consensus.gather((self.grid.get_stage_id(), kinds))))
        if carried and not self.zero_optimization():
            carried[PARAM_SHAPES] = self._get_zero_param_shapes()  # DeepSpeed adds them only with ZeRO
        return carried

    @resuming
    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load a checkpoint, in its own shape if these processes can form it.

        With other processes, or a fixed shape, weights and the optimiser's state are loaded by name into the present
        shape. With ``load_module_only`` weights alone are read.

        Raises:
            ConfigError: on every rank. Damaged file, other layers, or fewer frozen layers: nothing has been changed.
                No optimiser state for a trained parameter: only the frozen layers have been changed.
        """
        self._refuse_broken()
        if self.load_universal_checkpoint():
            return self._load_universal(
                load_dir, tag, load_lr_scheduler_states, load_optimizer_states, load_module_only
            )
        folder, whole = self.recover_checkpoint(load_dir, tag), not load_module_only
        optimizer, scheduler = load_optimizer_states and whole, load_lr_scheduler_states and whole
        state = self._consensus.decide(lambda: read_checked(folder)) if folder is not None and whole else None
        by_name, saved = False, None
        if folder is not None:
            wants = wanted(self, optimizer, scheduler, bool(load_module_strict))
            by_name = self._check_saved(folder, state, wants)
        if state is not None and folder is not None:
            now = (self._frozen, list(map(int, self.module.parts)))
            if by_name and state["frozen_layers"] != self._frozen:
                self._change(state["frozen_layers"], self.num_stages, step=None)
            elif not by_name and (state["frozen_layers"], state["parts"]) != now:
                self._change(state["frozen_layers"], state["stages"], state["parts"], step=None)
            if by_name and optimizer and self.basic_optimizer is not None:
                saved = self._saved(folder, state)
        path, client_state = self._load_checked(
            load_dir, tag, load_module_strict, load_optimizer_states and saved is None, load_lr_scheduler_states,
            load_module_only, custom_load_fn,
        )  # fmt: skip
        if saved is not None:
            self._put(saved)
        self._go_on(state)
        return path, _users(client_state)

    def _check_saved(self, folder: Path, state: Any, wants: Wanted) -> bool:
        """Check a checkpoint before any change; return whether it is read by name into this shape; collective."""
        topology, parts = self.module._topo, self.module.parts
        if state is None:
            self._check_files(folder, topology, parts, wants)
            return False
        now = self._state()
        self._consensus.agree(error_of(lambda: check(state, now)))
        if same_shape(state, now, self.elastic_pipeline.moves):
            if (state["frozen_layers"], state["parts"]) != (self._frozen, now["parts"]):
                wants = wants._replace(optimizer=None)  # the engine is reshaped first
            self._check_files(folder, resized(topology, state["stages"]), state["parts"], wants)
            return False
        trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
        files = [part["file"] for part in read_by(state.get("optimizer") or [], self._tensor_rank(), trained)]
        self._check_files(
            folder, topology, parts, wants._replace(states=False, parts=None), files if wants.states else ()
        )
        return True

    def _tensor_rank(self) -> int:
        return int(self.grid.get_slice_parallel_rank()) if self.grid.model_parallel_size > 1 else 0

    def _load_universal(self, load_dir: Any, tag: Any, lr_scheduler: bool, optimizer: bool, module_only: bool) -> Any:
        """Load the output of `ds_to_universal` into the present shape.

        Raises:
            ConfigError: on every rank; only the frozen layers may have been changed.
        """
        found: list[Universal] = []
        self._consensus.agree(
            error_of(lambda: self._read_universal(found, load_dir, tag, optimizer and not module_only))
        )
        (universal,) = found
        state = universal.state
        if state is not None and state["frozen_layers"] != self._frozen:
            self._change(state["frozen_layers"], self.num_stages, step=None)
        self._consensus.agree(error_of(lambda: universal.check(numbers_of(self), untrained(self.module))))
        path, client_state = self._load_checked(
            load_dir, tag, load_optimizer_states=self.zero_optimization(), load_lr_scheduler_states=lr_scheduler
        )
        if not self.zero_optimization():  # BF16_Optimizer could, but DeepSpeed asks for ZeRO
            self._load_zero_checkpoint(load_dir, universal.folder.name)
            self.optimizer.update_lp_params()
        universal.fill(self.module, self._tensor_rank(), self.grid.model_parallel_size)
        self._go_on(state)
        return path, _users(client_state)

    def _load_zero_checkpoint(self, load_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> Any:
        """Load ZeRO's part; DeepSpeed's own method fails if a rank has nothing of a group of a universal checkpoint."""
        if not self.load_universal_checkpoint():
            return super()._load_zero_checkpoint(load_dir, tag, *args, **kwargs)
        folder = Path(load_dir) / str(tag)
        # as DeepSpeed's method does for one, without shapes that are never read
        with groups_filled(self.optimizer, folder):
            self.optimizer.load_state_dict(None, load_optimizer_states=True, checkpoint_folder=str(folder))
        return True

    def _read_universal(self, found: list[Universal], load_dir: Any, tag: Any, whole: bool) -> None:
        if not is_wrapped(self.optimizer) or self.fp16_enabled():
            raise bad_value(
                KEY, True, "false without bf16 or ZeRO-1, and with fp16", '"zero_optimization": {"stage": 1}'
            )
        if not whole:
            raise ConfigError(
                "load_checkpoint: got load_module_only or no optimizer states beside checkpoint.load_universal, must be the "
                "whole training, use a checkpoint that is not converted"
            )
        universal = Universal(load_dir, tag)
        if not (universal.folder / "zero").is_dir():
            raise ConfigError(f"{KEY}: got {universal.folder}, must be an output folder of ds_to_universal, use one")
        if universal.state is not None:
            now = self._state_here()
            check(universal.state, {**now, "tensor_parallel_size": universal.state["tensor_parallel_size"]})
        found.append(universal)

    def _saved(self, folder: Path, state: Any) -> SavedStates:
        """Read the optimizer's new state before anything is changed; collective."""
        if not is_wrapped(self.optimizer):
            where = "to read a checkpoint of another shape"
            check_inside(self.basic_optimizer, self.module, self.param_names, self._consensus.gather, where)
        wanted = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        tensor = self._tensor_rank()
        parts, groups = state.get("optimizer") or [], len(self.basic_optimizer.param_groups)
        number_of: dict[str, int] = {}
        for numbers in self._consensus.gather(numbers_of(self)):
            number_of |= numbers
        found: list[SavedStates] = []
        self._consensus.agree(
            error_of(lambda: found.append(SavedStates(folder, parts, tensor, groups, number_of, wanted)))
        )
        return found[0]

    def _put(self, saved: SavedStates) -> None:
        """Replace the optimizer's states by these; collective."""
        with self._poison_on_error():
            self._runtime.close()
            before = self.optimizer
            wrapped = is_wrapped(before)
            if wrapped:
                unwrap(before, self.module)
            put(self.basic_optimizer, self.module, saved, wrapped)
            scheduler, groups = self.lr_scheduler, self.basic_optimizer.param_groups
            if hasattr(scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
                # torch's schedulers have lists by group, loaded in the checkpoint's order
                scheduler.base_lrs = [group["initial_lr"] for group in groups]
                scheduler._last_lr = [group["lr"] for group in groups]
            if wrapped:
                self.optimizer = self._wrapped(self.basic_optimizer, before)
            self._build_runtime()

    def _go_on(self, state: Any) -> None:
        """Restore a checkpoint's decisions, norms, seed and order of samples; None: the order of samples alone."""
        if state is not None:
            self._load_cache_state(state.get("cache"))
            total, count = state.get("losses", (0.0, 0))
            self._losses = total, count
            self._seed = state["seed"]
            self._reseed()
            if self._norms is not None:
                self._norms.load(state["norms"])
        self._follow_data()
        if state is not None:
            self._load_data_state(state.get("data"))
            self._freezer.load(state["policy"])
        elif self.global_steps:
            self._note_epochs(self.global_steps)
            self._freezer.begin(self.global_steps)

    def _state(self) -> dict[str, Any]:
        """Return the state of the elastic part for a checkpoint; collective."""
        return {**self._state_here(), "norms": None if self._norms is None else self._norms.state(self._consensus)}

    def _state_here(self) -> dict[str, Any]:
        return {
            "frozen_layers": self._frozen,
            "stages": self.num_stages,
            "parts": list(map(int, self.module.parts)),  # some may be numpy integers
            "layers": len(self.module._layer_specs),
            "processes": self.world_size,
            "tensor_parallel_size": self.grid.model_parallel_size,
            "train_batch_size": self.batches[0][0],
            "data": self._data_state(),
            "cache": self._cache_state(),
            "seed": self._seed,
            "policy": self._freezer.state(),
            "losses": [float(self._losses[0]), self._losses[1]],
        }


def _users(client_state: Any) -> Any:
    """Return the user's part of a client state."""
    if client_state and client_state.pop(CARRIED, None) is not None:
        client_state.pop(UNIVERSAL_CHECKPOINT_INFO, None)
    return client_state


def resized(topology: ProcessTopology, stages: int) -> ProcessTopology:
    """Return a topology with the same axes and processes, but another number of stages."""
    sizes = {"pipe": stages, "data": topology.get_dim("pipe") * topology.get_dim("data") // stages}
    names = topology.get_axis_names()
    return ProcessTopology(axes=names, dims=[sizes.get(name, topology.get_dim(name)) for name in names])
