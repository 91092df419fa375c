"""Checkpoints of an elastic engine: loaded in their own shape, or by parameter name into another one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_terapipe.bf16_parts import LoadArguments
from ds_terapipe.elastic.changing import Change
from ds_terapipe.elastic.moves.start import places_for
from ds_terapipe.elastic.saved.named import NamedCheckpointer, put, users
from ds_terapipe.elastic.saved.restore import about, read_by
from ds_terapipe.elastic.saved.state import check, read, resized
from ds_terapipe.json_files import write_json
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.names import ELASTIC_STATE
from ds_terapipe.overrides import replaced
from ds_terapipe.pipeline.checkpoints import Names
from ds_terapipe.pipeline.saved_files import Wanted, wanted
from ds_terapipe.pipeline.transport.consensus import Consensus

if TYPE_CHECKING:
    from ds_terapipe.elastic.controller import ElasticController


class ElasticCheckpointer(NamedCheckpointer):
    """Saves frozen layers, the shape and the policy's state with a checkpoint, and loads it into any shape.

    Args:
        controller: owns the state, and applies a checkpoint's changes.
        consensus: see :class:`NamedCheckpointer`.
    """

    def __init__(self, controller: ElasticController, consensus: Consensus) -> None:
        super().__init__(consensus)
        self._controller = weakref.proxy(controller)

    @property
    def frozen_by_policy(self) -> Collection[str]:
        """Override `NamedCheckpointer.frozen_by_policy`."""
        names: Collection[str] = self._controller.freezing.aside
        return names

    @contextmanager
    def as_saved(self, engine: Any) -> Iterator[dict[str, Any]]:
        """Override `NamedCheckpointer.as_saved`: what DeepSpeed leaves out as frozen was so from the start; collective."""
        module, names_of = engine.module, engine.module._get_frozen_parameter_names

        def frozen_in(layer: Any) -> list[str]:
            prefix = next((each for each, found in ModelChunks(module).layers.items() if found is layer), "")
            return [name for name in names_of(layer) if prefix + name not in self.frozen_by_policy]

        with replaced(module, _get_frozen_parameter_names=frozen_in), super().as_saved(engine) as placed:
            yield placed

    def write_beside(self, engine: Any, folder: Path, names: Names) -> None:
        """Write the file of the elastic part into the folder of a checkpoint; collective."""
        parts = self._consensus.gather(about(engine, names))
        state = {**self.state(engine), "optimizer": parts}
        self._consensus.decide(lambda: write_json(folder / ELASTIC_STATE, state))

    def load(self, engine: Any, load: Callable[..., Any], given: LoadArguments) -> Any:
        """Load a checkpoint, in its own shape if these processes can form it.

        With other processes, or a fixed shape, weights and the optimiser's state are loaded by name into the present
        shape. With ``load_module_only`` weights alone are read.

        Raises:
            ConfigError: on every rank. Damaged file, other layers, or fewer frozen layers: nothing has been changed.
                No optimiser state for a trained parameter: only the frozen layers have been changed.
        """
        if engine.load_universal_checkpoint():
            return super().load(engine, load, given)
        folder, state, put_states = self.recover(engine, given.load_dir, given.tag), None, None
        if folder is not None:
            if not given.load_module_only:
                state = self._consensus.decide(lambda: read(folder))
            wants = wanted(engine, given)
            if state is None:
                put_states = self.check(engine, folder, wants)
            else:
                stays, by_name = self._check_saved(engine, folder, state, wants)
                self._take_shape(engine, state, stays)
                if by_name and given.optimizer and engine.basic_optimizer is not None:
                    saved = self.read_named(engine, folder, state.get("optimizer") or [])
                    put_states = partial(put, engine, saved, given.scheduler)
        path, client_state = self.load_checked(engine, load, given, put_states)
        self.load_state(engine, state)
        return path, users(client_state)

    def prepare(self, engine: Any, state: Any) -> None:
        """Override `NamedCheckpointer.prepare`: check the state, and freeze as many layers; collective."""
        if state is not None:
            now = {**self._state_here(engine), "tensor_parallel_size": state["tensor_parallel_size"]}
            self._consensus.together(lambda: check(state, now))
            self._take_shape(engine, state, stays=True)

    def _take_shape(self, engine: Any, state: Any, stays: bool) -> None:
        """Freeze as many layers as a checkpoint has, and take its shape unless this one ``stays``; collective."""
        stages, parts = (engine.num_stages, None) if stays else (state["stages"], state["parts"])
        self._controller.follow(engine, Change(state["frozen_layers"], stages, parts), step=None)

    def _check_saved(self, engine: Any, folder: Path, state: Any, wants: Wanted) -> tuple[bool, bool]:
        """Check a checkpoint before any change; collective.

        Returns:
            Whether this shape stays, and whether the optimizer's state is read by name.
        """
        topology, chunks = engine.module._topo, ModelChunks(engine.module)
        now = self.state(engine)
        self._consensus.together(lambda: check(state, now))
        same_parts = state["parts"] == now["parts"] and state["places"] == now["places"]
        movable = engine.elastic_pipeline.moves and state["places"] == [*places_for(engine, state["stages"])]
        if state["processes"] == now["processes"] and (same_parts or movable):
            if not same_parts or state["frozen_layers"] != now["frozen_layers"]:
                wants = wants._replace(optimizer=None)  # the engine is reshaped first
            there = {key: state[key] for key in ("parts", "places")}
            shape = resized(topology, state["stages"])
            return False, self.check_files(engine, folder, shape, wants=wants._replace(placed=there), **there)
        trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
        read = read_by(state.get("optimizer") or [], engine.grid.get_slice_parallel_rank(), trained)
        beside = [part["file"] for part in read] if wants.states else []
        weights = wants._replace(states=False, parts=None)
        self.check_files(engine, folder, topology, chunks.parts, chunks.places, weights, beside)
        return True, True

    def state(self, engine: Any) -> dict[str, Any]:
        """Override `NamedCheckpointer.state`: shape, policies and data; collective."""
        return {**self._state_here(engine), "norms": self._controller.freezing.norms.state(self._consensus)}

    def _state_here(self, engine: Any) -> dict[str, Any]:
        """Return the state without gradient norms, which are spread over ranks."""
        parts, chunks = self._controller, ModelChunks(engine.module)
        return {
            "frozen_layers": engine.frozen_layers,
            "stages": engine.num_stages,
            "parts": list(chunks.parts),
            "places": list(chunks.places),
            "layers": len(chunks.specs),
            "processes": engine.world_size,
            "tensor_parallel_size": engine.grid.model_parallel_size,
            "train_batch_size": parts.data.batches[0][0],
            "data": parts.data.state(),
            "cache": parts.caching.state(),
            "seed": parts.seed,
            **parts.freezing.state(),
        }

    def load_state(self, engine: Any, state: Any) -> None:
        """Override `NamedCheckpointer.load_state`: restore decisions, norms, seed and order of samples; None: the last alone."""
        parts = self._controller
        parts.data.follow_shape(engine)
        if state is not None:
            parts.caching.load(state.get("cache"))
            parts.reseed(state["seed"])
            parts.data.load(state.get("data"))
            parts.freezing.load(state)  # which may count epochs
        elif engine.global_steps:
            parts.data.note_epochs(engine)
            parts.freezing.freezer.begin(engine.global_steps)
