"""Freezing and unfreezing of layers: the policy is asked, parameters leave and enter the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor

from ds_terapipe.elastic.moves.groups import numbers, refill, release
from ds_terapipe.elastic.moves.layers import names_in
from ds_terapipe.elastic.policies.freeze import ModelLayers
from ds_terapipe.elastic.policies.freezer import LOSS_RISE, LR_RESTART, Freezer, Signals
from ds_terapipe.elastic.policies.gradient_norms import GradientNorms
from ds_terapipe.elastic.settings import FreezeSettings
from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.pipeline.parameter_groups import outside
from ds_terapipe.pipeline.recording.report import emit
from ds_terapipe.pipeline.transport.consensus import Consensus

logger = logging.getLogger(__name__)


class LayerFreezing:
    """Frozen entries of a model's layer list, from the first on.

    Args:
        settings: the block ``elastic_pipeline.freeze``.
        layers: entries of the layer list.
        device: device of the layers.
        completed: see :class:`Freezer`.

    Attributes:
        frozen: number of entries frozen by the policy.
        aside: parameter groups of all parameters that the policy has frozen, by name, over all ranks.
        freezer: calls the policy.
        norms: gradient norms since the policy last read them.
    """

    def __init__(
        self, settings: FreezeSettings, layers: ModelLayers, device: torch.device, completed: Callable[[int], int]
    ) -> None:
        self._settings, self.frozen = settings, 0
        self.freezer = Freezer(settings, layers, completed)
        self.norms = GradientNorms(len(layers.trainable), device, self.freezer.needs_gradients)
        self.aside: dict[str, int] = {}
        self._tied: frozenset[str] = frozenset()  # keys of frozen tied layers that are also used after the prefix
        self._losses: tuple[Tensor | float, int] = (0.0, 0)  # sum and count since the policy last read them

    # --------------------------------------------------------------------------------------------------------- decisions

    def decide(self, engine: Any, step: int) -> int:
        """Return the number of frozen entries for a step; collective if the policy needs data of all ranks."""
        asked, consensus, signals = self._settings.unfreeze, engine._consensus, None
        if asked:
            # groups of some stages may have other rates
            lr = max(consensus.gather(_highest_lr(engine.basic_optimizer))) if LR_RESTART in asked else 0.0
            signals = Signals(lr, self._take_losses)
        decide = partial(self.freezer.decide, step, partial(self.norms.take, consensus), signals)
        frozen = self._same_everywhere(consensus, decide) if self.freezer.is_users else decide()
        if self.freezer.reason is not None and frozen < self.frozen and engine.global_rank == 0:
            emit(f"elastic_pipeline.freeze: step {step}: layers train again ({self.freezer.reason})")
        return frozen

    def _same_everywhere(self, consensus: Consensus, decide: Callable[[], int]) -> int:
        """Return the decision of a user's policy, which may fail, or differ, on some ranks alone; collective.

        Raises:
            ConfigError: on every rank, where they differ; else the policy's own error, on every rank.
        """
        decided = consensus.together(decide)
        said = [int(entries) for entries in consensus.gather(decided)]
        rank = next((rank for rank, entries in enumerate(said) if entries != said[0]), None)
        if rank is not None:
            raise ConfigError(
                f"elastic_pipeline.freeze.policy: got {said[rank]} entries to freeze on rank {rank} and {said[0]} on rank 0 from "
                f"{shown(self._settings.policy)}, must be the same on all ranks, use the policy's arguments and state alone"
            )
        return decided

    def record_loss(self, loss: Tensor) -> None:
        """Add the loss of a step, without waiting for the device."""
        if LOSS_RISE in self._settings.unfreeze:
            total, count = self._losses
            self._losses = total + loss.detach().double(), count + 1

    def _take_losses(self) -> float | None:
        (total, count), self._losses = self._losses, (0.0, 0)
        return float(total) / count if count else None

    # ----------------------------------------------------------------------------------------------------------- changes

    def enter_evaluation(self, module: Any, entries: int) -> None:
        """Put the layers of the first ``entries`` into evaluation mode: they have no dropout."""
        prefix = names_in(module, range(entries))
        for name, layer in ModelChunks(module).layers.items():
            if name in prefix:
                layer.eval()

    def freeze(self, engine: Any, frozen: int) -> int:
        """Freeze the first ``frozen`` entries and unfreeze the others; return the bytes freed on this rank; collective."""
        self.frozen, freed = frozen, 0
        module, optimizer = engine.module, engine.basic_optimizer
        prefix = names_in(module, range(frozen))
        self._warn_of_tied(module, engine.global_rank)
        number_of = numbers(optimizer)
        aside = {}
        for name, parameter in module.named_parameters():
            if name.startswith(prefix) and parameter.requires_grad:
                parameter.requires_grad_(False)
                freed += 0 if parameter.grad is None else parameter.grad.numel() * parameter.grad.element_size()
                parameter.grad = None
                aside[name] = number_of.get(id(parameter), 0)
        # layers may move to other ranks before they are unfrozen
        for of_rank in engine._consensus.gather(aside):
            self.aside |= of_rank
        self._take_back(engine, prefix)
        return freed if optimizer is None else freed + release(optimizer)

    def _take_back(self, engine: Any, prefix: tuple[str, ...]) -> None:
        """Unfreeze parameters that are no longer in the prefix, with zero moments and step 0."""
        module, optimizer = engine.module, engine.basic_optimizer
        back = {name: group for name, group in self.aside.items() if not name.startswith(prefix)}
        self.aside = {name: group for name, group in self.aside.items() if name not in back}
        for name, parameter in module.named_parameters():
            if name in back:
                parameter.requires_grad_(True)
        if back and optimizer is not None:
            number_of = numbers(optimizer)
            here = {name: number_of[id(p)] for name, p in module.named_parameters() if id(p) in number_of}
            others = outside(optimizer, module, engine.param_names)
            refill(optimizer, module, {**back, **here}, {}, outside=others)

    def _warn_of_tied(self, module: Any, rank: int) -> None:
        specs = ModelChunks(module).specs
        tied = {spec.key for spec in specs[: self.frozen] if isinstance(spec, TiedLayerSpec)}
        later = tied & {spec.key for spec in specs[self.frozen :] if isinstance(spec, TiedLayerSpec)}
        if later - self._tied and rank == 0:
            names = ", ".join(sorted(later))
            logger.warning("elastic_pipeline.freeze: what is tied (%s) is frozen where it is used later, too", names)
        self._tied |= later

    # ------------------------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Return the decisions and losses for a checkpoint; norms are apart, for they need all ranks."""
        return {"policy": self.freezer.state(), "losses": [float(self._losses[0]), self._losses[1]]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the decisions, losses and norms of a checkpoint."""
        total, count = state.get("losses", (0.0, 0))
        self._losses = total, count
        self.freezer.load(state["policy"])
        self.norms.load(state["norms"])


def _highest_lr(optimizer: Any) -> float:
    groups = [] if optimizer is None else optimizer.param_groups
    return max((float(group["lr"]) for group in groups), default=0.0)
