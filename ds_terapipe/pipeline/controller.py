"""Interface between an engine and what changes its model or its placement from step to step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ds_terapipe.job import Job
from ds_terapipe.pipeline.batch import read_items
from ds_terapipe.pipeline.checkpoints import Checkpointer
from ds_terapipe.pipeline.operators.random_streams import RandomStreams
from ds_terapipe.pipeline.parameter_groups import arrange
from ds_terapipe.pipeline.stage import Stage
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.schedule import Placement


class Controller:
    """Base class of an engine's controller; its methods do what an engine does whose model and placement stay.

    The engine calls every method on all ranks, with itself as the first argument.

    Attributes:
        streams: seeds the layers' random numbers; None: layers use the process's own random state.
        seed: seed of the streams; None before the first step.
        has_moved: whether layers have been frozen or moved since the start.
        ended: whether the training has ended, and not just the process.
    """

    streams: RandomStreams | None = None
    seed: int | None = None
    has_moved = ended = False

    # ------------------------------------------------------------------------------------------------------ construction

    def arrange_groups(self, engine: Any, optimizer: Any, kind: str | None) -> None:
        """Arrange the parameter groups for DeepSpeed's wrapper ``kind``, None without one; collective."""
        if kind is not None:
            gather = Job.current().gather
            arrange(optimizer, kind, engine.module, engine.param_names, engine.client_lr_scheduler, gather)

    def check_optimizer(self, engine: Any) -> None:
        """Refuse an optimizer; called in DeepSpeed's constructor. Raises ConfigError."""

    def new_checkpointer(self, consensus: Consensus) -> Checkpointer:
        """Return what saves and loads the engine's checkpoints."""
        return Checkpointer(consensus)

    def building(self, engine: Any) -> AbstractContextManager[None]:
        """Context manager around the construction of a runtime.

        Tensor-parallel ranks must draw the same dropout of hidden states, however a script seeds its processes.
        """
        if engine.grid.get_slice_parallel_world_size() > 1:
            self.make_streams(engine)
        return nullcontext()

    def make_streams(self, engine: Any) -> None:
        """Give every layer random streams of its own; idempotent."""
        if self.streams is None:
            self.streams = RandomStreams(0, engine.device, engine.grid.get_slice_parallel_rank())

    def first_stage(self, engine: Any, placement: Placement) -> Callable[..., Stage]:
        """Return the factory of the model's first stage."""
        return Stage

    # ------------------------------------------------------------------------------------------------------------- steps

    def agree_on_seed(self, engine: Any) -> None:
        """Seed the streams before the first step; collective.

        The first rank's seed is read now: users may seed ranks differently, also after building the engine.
        """
        if self.streams is not None and self.seed is None:
            self.reseed(engine._consensus.decide(lambda: _first_seed(engine.module)))

    def reseed(self, seed: int | None) -> None:
        """Set the seed of the random streams; None: that of the first rank at the next step."""
        assert self.streams is not None
        self.seed, self.streams.seed = seed, seed or 0

    def preparing(self, engine: Any) -> AbstractContextManager[None]:
        """Context manager around reading a step's micro-batches, agreeing on them and inspecting the model."""
        return nullcontext()

    def read(self, engine: Any, pull: Callable[[], Any], micro_batches: int) -> list[Any]:
        """Read micro-batches, (inputs, labels) each, if this rank needs them; ``pull`` reads one."""
        view = engine._runtime.view
        return read_items(pull, micro_batches) if view.has_first or view.has_last else []

    def enter_training(self, engine: Any) -> None:
        """Put layers into training mode."""
        engine.module.train()

    @property
    def times_layers(self) -> bool:
        """Whether the layers of the running step are timed."""
        return False

    def optimizer_step(self, engine: Any) -> AbstractContextManager[None]:
        """Context manager around the optimizer's step."""
        return nullcontext()

    # --------------------------------------------------------------------------------------------------------------- end

    def release(self) -> None:
        """Release this process's resources without collectives; idempotent."""


def _first_seed(module: Any) -> int:
    return int(module.base_seed if module.seed_layers else torch.initial_seed())
