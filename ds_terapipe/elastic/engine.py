"""DeepSpeed's pipeline engine for a model of which less and less is trained, on fewer and fewer stages.

At the beginning of a step the policies say which entries of the layer list are frozen and on how many stages the rest is. Where
that changes, frozen parameters leave the optimiser, layers move with all that belongs to them (``transfer.py``), and DeepSpeed's
engine is built anew around the same objects: engine, module, optimizer, scheduler and loader of the user stay the live ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.elastic.anew import build_anew
from ds_terapipe.elastic.costs import layer_costs, state_bytes, trained_sizes
from ds_terapipe.elastic.freeze import Freezer, ModelLayers, completed_intervals
from ds_terapipe.elastic.gradient_norms import GradientNorms
from ds_terapipe.elastic.groups import release
from ds_terapipe.elastic.layers import drop_copies, layers_here, names_in
from ds_terapipe.elastic.masters import is_wrapped, unwrap
from ds_terapipe.elastic.measured import Chooser
from ds_terapipe.elastic.optimizer import ElasticOptimizer, gathered
from ds_terapipe.elastic.report import Transition, TransitionReport
from ds_terapipe.elastic.reshape import Reshape, check_movable
from ds_terapipe.elastic.resize import Shape, balanced, check, shape_of, wanted_stages
from ds_terapipe.elastic.settings import EPOCH, ElasticPipelineConfig, check_alike
from ds_terapipe.elastic.state import check as check_state
from ds_terapipe.elastic.state import read as read_state
from ds_terapipe.elastic.state import write as write_state
from ds_terapipe.pipeline.closing import shape_groups
from ds_terapipe.pipeline.random_streams import RandomStreams
from ds_terapipe.process_groups import close_groups

logger = logging.getLogger(__name__)


class ElasticPipelineEngine(ElasticOptimizer):
    """A :class:`TokenPipelineEngine` that freezes layers and reshapes its pipeline at step boundaries.

    Args:
        elastic_pipeline: the block of the same name.
        token_pipeline: that one's, or one slice where there is none.
        *args, **kwargs: as for ``PipelineEngine``, which ``deepspeed.initialize`` passes.
    """

    elastic_pipeline: ElasticPipelineConfig
    _seed: int | None = None  # of the random streams
    _chooser: Chooser | None = None  # where layers may move: what they take
    _frozen = 0  # entries of the layer list that the policy has frozen
    _changed = False  # since the start
    _tied_frozen: frozenset[str] = frozenset()  # keys of tied layers that are frozen, and used after the prefix

    def __init__(self, *args: Any, elastic_pipeline: ElasticPipelineConfig, **kwargs: Any) -> None:
        self.elastic_pipeline = elastic_pipeline
        self._arguments = {
            key: value for key, value in kwargs.items() if key not in ("token_pipeline", "model_parameters")
        }
        self._reshaped: list[Callable[[ElasticPipelineEngine], None]] = []
        self._transitions = TransitionReport()
        # before all that depends on it
        check_alike(gathered(elastic_pipeline.model_dump(), kwargs["model"].world_group))
        super().__init__(*args, **kwargs)
        module = self.module
        self._start_feeding()
        self._know_phases()
        self._sizes = trained_sizes(self.module, self._control)
        layers = ModelLayers(tuple(size > 0 for size in self._sizes))
        self.untrained_layers = self._sizes.index(
            next(size for size in self._sizes if size)
        )  # entries that the user froze
        tensor, batch = self.grid.model_parallel_size, self.train_batch_size()
        check(
            elastic_pipeline, layers, self.num_stages, self.world_size, tensor, batch, self.micro_batch_size,
            self.training_data is not None, self.batches,
        )  # fmt: skip
        self._freezer = Freezer(elastic_pipeline.freeze, layers, self._intervals_before)
        self._norms = GradientNorms(len(self._sizes), self.device) if self._freezer.needs_gradients else None
        if elastic_pipeline.cache.enabled and self.global_rank == 0:
            logger.warning(
                "elastic_pipeline.cache: not there yet, the outputs of frozen layers are computed in every step"
            )
        if self.elastic_pipeline.moves:
            self._chooser = Chooser(self, self._control)
            dtype = self._layer_dtype
            self._control.agree(_error_of(lambda: check_movable(module, self.basic_optimizer, self.device, dtype)))
            drop_copies(module)

    # --------------------------------------------------------------------------------------------------- what is shown

    @property
    def frozen_layers(self) -> int:
        """Entries of the layer list, from the first on, that the policy has frozen."""
        return self._frozen

    def on_reshape(self, callback: Callable[[ElasticPipelineEngine], None]) -> None:
        """Call ``callback`` with the engine after each reshape, for what depends on the present shape."""
        self._reshaped.append(callback)

    # ------------------------------------------------------------------------------------------------------------ steps

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """As ``TokenPipelineEngine.train_batch``, on the shape and with the layers frozen that the policies say for this step."""
        self._refuse_broken()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self._seed is None:
            # of the first rank, and now: users seed each stage in its own way, after they have built the engine, too
            self._seed = self._control.decide(self._first_seed)
            self._streams.seed = self._seed
        step = self.global_steps
        self._note_epochs(step)
        frozen = self._freezer.decide(step, self._gradient_norms)
        stages = wanted_stages(
            self.elastic_pipeline.resize, step, self.num_stages, self.start_shape.stages, self._sizes, frozen
        )
        parts, taken = None, None if self._chooser is None else self._chooser.decide(frozen)
        if taken is not None:
            stages, parts = taken.shape.stages, taken.parts
        if (frozen, stages) != (self._frozen, self.num_stages) or parts not in (None, tuple(self.module.parts)):
            self._change(frozen, stages, parts, step=step)
        with nullcontext() if self._chooser is None else self._chooser.watching():
            return super().train_batch()

    def _settle(self) -> None:
        if self._streams is None:
            shard = self.grid.get_slice_parallel_rank() if self.grid.model_parallel_size > 1 else 0
            self._streams = RandomStreams(0, self.device, shard)
        super()._settle()
        if self._chooser is not None:
            self._chooser.begin()

    def _choice_settings(self) -> TokenPipelineConfig:
        """A plan, and a file of measurements, are for the placement of the start."""
        settings = super()._choice_settings()
        return settings.model_copy(update={"plan_path": None, "measurements_path": None}) if self._changed else settings

    def follow_phase(self, batch: int, micro_batch: int) -> None:
        """As ``ElasticPhases.follow_phase``; what has been measured is of another batch."""
        super().follow_phase(batch, micro_batch)
        if self._chooser is not None and len(self.batches) > 1:
            self._chooser.begin_anew()

    def _first_seed(self) -> int:
        return int(self.module.base_seed if self.module.seed_layers else torch.initial_seed())

    def _gradient_norms(self) -> Sequence[float] | None:
        return None if self._norms is None else self._norms.take(self._control)

    def _intervals_before(self, step: int) -> int:
        """How many intervals were over when a step began."""
        if self.elastic_pipeline.freeze.interval == EPOCH and step in self._epochs_at:
            return self._epochs_at[step]
        samples = None if self.training_data is None else len(self.training_data)
        return completed_intervals(self.elastic_pipeline.freeze.interval, step, self.train_batch_size(), samples)

    def _enter_training(self) -> None:
        super()._enter_training()
        for name, layer in layers_here(self.module).items():
            if name in self._prefix:
                layer.eval()

    @property
    def _prefix(self) -> tuple[str, ...]:
        """What the names of the parameters that the policy froze begin with."""
        return names_in(self.module, range(self._frozen))

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        if self._norms is not None:
            tensor, add = 0, None
            if self.grid.model_parallel_size > 1:
                tensor, group = self.grid.get_slice_parallel_rank(), self.grid.slice_proc_group
                add = partial(torch.distributed.all_reduce, group=group)
            self._norms.add(self.module, tensor, add)
        with nullcontext() if self._chooser is None else self._chooser.updating():
            super()._exec_optimizer_step(lr_kwargs)

    # ------------------------------------------------------------------------------------------------------ transitions

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As ``TokenPipelineEngine.save_checkpoint``; the shape, what is frozen and what the policy knows go with it."""
        self._refuse_broken()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        state = self._state()
        self._control.decide(lambda: write_state(save_dir, tag, state))
        return super().save_checkpoint(save_dir, tag, client_state, *args, **kwargs)

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
        """As ``TokenPipelineEngine.load_checkpoint``, after a change to the shape that the checkpoint was saved in.

        With ``load_module_only`` there is nothing to go on with: weights come into the shape that is there.

        Raises:
            ConfigError: on every rank, a checkpoint of other processes or layers, or with less frozen; nothing has been changed.
        """
        self._refuse_broken()
        state = None if load_module_only else self._control.decide(lambda: read_state(load_dir, tag))
        if state is not None:
            now = self._state()
            self._control.agree(_error_of(lambda: check_state(state, now, self.elastic_pipeline.moves)))
            if (state["frozen_layers"], state["parts"]) != (self._frozen, now["parts"]):
                self._change(state["frozen_layers"], state["stages"], state["parts"], step=None)
            self._freezer.load(state["policy"])
            self._seed = state["seed"]
            self._streams.seed = self._seed or 0
        loaded = super().load_checkpoint(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
            custom_load_fn,
        )  # fmt: skip
        if state is not None and self._norms is not None:
            self._norms.load(state["norms"])
        self._follow_data()
        if state is not None:
            self._load_data_state(state.get("data"))
        return loaded

    def _state(self) -> dict[str, Any]:
        """What a checkpoint keeps; collective."""
        return {
            "frozen_layers": self._frozen,
            "stages": self.num_stages,
            "parts": list(map(int, self.module.parts)),  # some may be numpy's
            "layers": len(self._sizes),
            "processes": self.world_size,
            "tensor_parallel_size": self.grid.model_parallel_size,
            "train_batch_size": self.batches[0][0],
            "data": self._data_state(),
            "seed": self._seed,
            "policy": self._freezer.state(),
            "norms": None if self._norms is None else self._norms.state(self._control),
        }

    def _change(self, frozen: int, stages: int, parts: Sequence[int] | None = None, *, step: int | None) -> None:
        """Freeze and reshape; collective.

        Args:
            frozen, stages: from now on.
            parts: the entries of the stages, by default balanced by what they cost.
            step: before which this is; None: before a checkpoint is read.
        """
        started, shape, before = time.perf_counter(), self.shape, state_bytes(self, self._control)
        new = shape_of(
            stages,
            self.world_size,
            self.grid.model_parallel_size,
            self.train_batch_size(),
            self.start_shape.micro_batch,
        )
        if parts is None and (new != shape or (self.elastic_pipeline.moves and stages > 1)):
            *costs, _ = layer_costs(self, self._control, self._layer_times)
            present = list(map(int, self.module.parts)) if new == shape else None
            parts = balanced(*costs, max(frozen, self.untrained_layers), stages, present)
        reshape = None
        if parts is not None and (new != shape or list(parts) != list(self.module.parts)):
            reshape = Reshape(
                self.module, self.basic_optimizer, self._control, self._watch, self.device, self._layer_dtype
            )
            reshape.prepare(_resized(self.module._topo, new), parts)
        self._recorder.begin(self.global_steps + 1, wanted=step is not None and self._trace.wants(step + 1))
        with self._no_way_back(), self._recorder.collective("reshape"):
            self._assembly.close()
            wrapped = is_wrapped(self.optimizer)
            if wrapped:
                unwrap(self.optimizer, self.module)
            freed = self._freeze(frozen)
            if reshape is not None and self._norms is not None:
                self._norms.load(self._norms.state(self._control))  # whoever gets a layer has to know its past
            sent = 0 if reshape is None else self._reshape(new, reshape)
            if wrapped and reshape is None:
                self.optimizer = self._wrapped(self.basic_optimizer, self.optimizer)
            self._changed = True
            self._settle()
        self._trace.keep(self._recorder.end())
        self._tell(step, shape, before, time.perf_counter() - started, freed, sent)

    def _freeze(self, frozen: int) -> int:
        """Take what a longer prefix trains out of the training; bytes that this gives back on this rank."""
        self._frozen, freed = frozen, 0
        prefix, module = self._prefix, self.module
        self._say_tied()
        for name, parameter in module.named_parameters():
            if name.startswith(prefix) and parameter.requires_grad:
                parameter.requires_grad_(False)
                freed += 0 if parameter.grad is None else parameter.grad.numel() * parameter.grad.element_size()
                parameter.grad = None
        if self.basic_optimizer is None:
            return freed
        return freed + release(self.basic_optimizer)

    def _say_tied(self) -> None:
        specs = self.module._layer_specs
        tied = {spec.key for spec in specs[: self._frozen] if isinstance(spec, TiedLayerSpec)}
        later = tied & {spec.key for spec in specs[self._frozen :] if isinstance(spec, TiedLayerSpec)}
        if later - self._tied_frozen and self.global_rank == 0:
            names = ", ".join(sorted(later))
            logger.warning("elastic_pipeline.freeze: what is tied (%s) is frozen where it is used later, too", names)
        self._tied_frozen |= later

    def _reshape(self, shape: Shape, reshape: Reshape) -> int:
        """Go to a shape that was prepared; bytes that this rank sent."""
        old = shape_groups(self.module)
        reshape.run()
        close_groups(old)
        build_anew(self, shape, self._arguments)
        self._control.set_pipelines(self.grid.pipe_groups)
        self._follow_data()
        for callback in self._reshaped:
            callback(self)
        return reshape.sent_bytes

    def _times_layers(self) -> bool:
        return super()._times_layers() or (self._chooser is not None and self._chooser.times_layers)

    def _tell(self, step: int | None, before: Shape, fullest: float, seconds: float, freed: int, sent: int) -> None:
        """Say what a transition was; collective."""
        freed_bytes, sent_bytes = (sum(self._control.collect(float(each))) for each in (freed, sent))
        transition = Transition(
            step, self._frozen, len(self._sizes), before, self.shape, seconds, freed_bytes, sent_bytes, fullest,
            state_bytes(self, self._control),
        )  # fmt: skip
        self._trace.describe(stages=self.num_stages, frozen_layers=self._frozen)
        if self._chooser is not None:
            self._chooser.change_seconds = seconds
        if self.global_rank == 0:
            self._transitions.tell(transition, self.monitor, self.global_samples)


def _resized(topology: ProcessTopology, shape: Shape) -> ProcessTopology:
    """The same axes, with other numbers of stages and replicas."""
    sizes = {"pipe": shape.stages, "data": shape.replicas}
    names = topology.get_axis_names()
    return ProcessTopology(axes=names, dims=[sizes.get(name, topology.get_dim(name)) for name in names])


def _error_of(check: Callable[[], Any]) -> Exception | None:
    try:
        check()
    except Exception as error:  # whatever a user's layer raises while it is built
        return error
    return None
