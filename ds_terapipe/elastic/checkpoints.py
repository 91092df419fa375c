"""Checkpoints of an engine that freezes and reshapes: onto the shape that they were saved in, or by name onto another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from ds_terapipe.elastic.freezing import Freezing
from ds_terapipe.elastic.masters import is_wrapped, unwrap
from ds_terapipe.elastic.restore import SavedStates, about, put
from ds_terapipe.elastic.state import check, read, same_shape, write
from ds_terapipe.pipeline.checkpoints import tag_of
from ds_terapipe.pipeline.control import error_of


class ElasticCheckpoints(Freezing):
    """Part of the engine: what is frozen, the shape and what the policy knows go with a checkpoint."""

    loads_by_name = True  # FusedLamb's hook leaves BF16_Optimizer's parts to this one
    _seed: int | None = None  # of the random streams

    def _save_beside(self, folder: Path) -> None:
        parts = self._control.gather(about(self))
        state = {**self._state(), "optimizer": parts}
        self._control.decide(lambda: write(folder, state))

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
        """As ``TokenPipelineEngine.load_checkpoint``, on the shape that the checkpoint was saved in where there can be that one.

        Where there are other processes, or the shape may not change, weights and the optimiser's state come by name into the
        shape that is there. With ``load_module_only`` there is nothing to go on with: weights alone are read.

        Raises:
            ConfigError: on every rank, a checkpoint of other layers, or with less frozen; nothing has been changed.
        """
        self._refuse_broken()
        state = None
        if not load_module_only:
            self._recover(load_dir, tag)
            state = self._control.decide(lambda: read(load_dir, tag))
        # what BF16_Optimizer has without ZeRO, DeepSpeed 0.19.8 saves and fails to read
        by_name = isinstance(self.optimizer, BF16_Optimizer) and not self.zero_optimization()
        if state is not None:
            now = self._state()
            self._control.agree(error_of(lambda: check(state, now)))
            if not same_shape(state, now, self.elastic_pipeline.moves):
                by_name = True
                if state["frozen_layers"] != self._frozen:
                    self._change(state["frozen_layers"], self.num_stages, step=None)
            elif (state["frozen_layers"], state["parts"]) != (self._frozen, now["parts"]):
                self._change(state["frozen_layers"], state["stages"], state["parts"], step=None)
        saved = None
        if by_name and state is not None and load_optimizer_states and self.basic_optimizer is not None:
            saved = self._saved(Path(load_dir) / str(tag_of(load_dir, tag)), state)
        path, client_state = super().load_checkpoint(
            load_dir, tag, load_module_strict, load_optimizer_states and saved is None, load_lr_scheduler_states,
            load_module_only, custom_load_fn,
        )  # fmt: skip
        if saved is not None:
            self._put(saved)
        if state is not None:
            self._go_on(state)
        self._follow_data()
        if state is not None:
            self._load_data_state(state.get("data"))
        return path, client_state

    def _saved(self, folder: Path, state: Any) -> SavedStates:
        """What the optimiser will have, before anything is changed; collective."""
        wanted = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        tensor = self.grid.get_slice_parallel_rank() if self.grid.model_parallel_size > 1 else 0
        parts, groups = state.get("optimizer") or [], len(self.basic_optimizer.param_groups)
        found: list[SavedStates] = []
        self._control.agree(error_of(lambda: found.append(SavedStates(folder, parts, tensor, groups, wanted))))
        return found[0]

    def _put(self, saved: SavedStates) -> None:
        """Go on with these states; collective."""
        with self._no_way_back():
            self._assembly.close()
            before = self.optimizer
            wrapped = is_wrapped(before)
            if wrapped:
                unwrap(before, self.module)
            put(self.basic_optimizer, self.module, saved, wrapped)
            if wrapped:
                self.optimizer = self._wrapped(self.basic_optimizer, before)
            self._settle()

    def _go_on(self, state: Any) -> None:
        """With the decisions, the norms and the random numbers of a checkpoint."""
        self._freezer.load(state["policy"])
        total, count = state.get("losses", (0.0, 0))
        self._losses = total, count
        self._seed = state["seed"]
        self._streams.seed = self._seed or 0
        if self._norms is not None:
            self._norms.load(state["norms"])

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps; collective."""
        return {
            "frozen_layers": self._frozen,
            "stages": self.num_stages,
            "parts": list(map(int, self.module.parts)),  # some may be numpy's
            "layers": len(self.module._layer_specs),
            "processes": self.world_size,
            "tensor_parallel_size": self.grid.model_parallel_size,
            "train_batch_size": self.batches[0][0],
            "data": self._data_state(),
            "seed": self._seed,
            "policy": self._freezer.state(),
            "losses": [float(self._losses[0]), self._losses[1]],
            "norms": None if self._norms is None else self._norms.state(self._control),
        }
