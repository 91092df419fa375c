"""Part of an elastic engine that freezes layers, and unfreezes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor

from ds_terapipe.elastic.moves.groups import numbers, refill, release
from ds_terapipe.elastic.moves.layers import names_in
from ds_terapipe.elastic.optimizer import ElasticOptimizer
from ds_terapipe.elastic.policies.freeze import ModelLayers
from ds_terapipe.elastic.policies.freezer import LOSS_RISE, LR_RESTART, Freezer, Signals, completed_intervals
from ds_terapipe.elastic.policies.gradient_norms import GradientNorms
from ds_terapipe.elastic.settings import EPOCH
from ds_terapipe.pipeline.layer_list import layers_here
from ds_terapipe.pipeline.parameter_groups import outside
from ds_terapipe.pipeline.recording.report import emit

logger = logging.getLogger(__name__)


class Freezing(ElasticOptimizer):
    """Part of the engine: asks the policy, freezes parameters and unfreezes them."""

    _frozen = 0  # entries of the layer list frozen by the policy
    _tied_frozen: frozenset[str] = frozenset()  # keys of frozen tied layers that are also used after the prefix

    def _start_freezing(self, layers: ModelLayers) -> None:
        settings = self.elastic_pipeline.freeze
        self._freezer = Freezer(settings, layers, self._intervals_before)
        self._norms = GradientNorms(len(layers.trainable), self.device) if self._freezer.needs_gradients else None
        self._aside: dict[str, int] = {}  # parameter groups of all frozen parameters, by name, over all ranks
        self._losses: tuple[Tensor | float, int] = (0.0, 0)  # sum and count since the policy last read them

    @property
    def frozen_layers(self) -> int:
        """Number of entries of the layer list, from the first on, that the policy has frozen."""
        return self._frozen

    @property
    def _prefix(self) -> tuple[str, ...]:
        """Prefixes of the names of parameters that the policy froze."""
        return names_in(self.module, range(self._frozen))

    # ------------------------------------------------------------------------------------------------------- decisions

    def _decide_frozen(self, step: int) -> int:
        """Return the number of frozen entries for this step; collective if the policy needs data of all ranks."""
        asked = self.elastic_pipeline.freeze.unfreeze
        signals = None
        if asked:
            # groups of some stages may have other rates
            lr = max(self._consensus.collect(self._highest_lr())) if LR_RESTART in asked else 0.0
            signals = Signals(lr, self._take_losses)
        frozen = self._freezer.decide(step, self._gradient_norms, signals)
        if self._freezer.reason is not None and frozen < self._frozen and self.global_rank == 0:
            emit(f"elastic_pipeline.freeze: step {step}: layers train again ({self._freezer.reason})")
        return frozen

    def _highest_lr(self) -> float:
        groups = [] if self.basic_optimizer is None else self.basic_optimizer.param_groups
        return max((float(group["lr"]) for group in groups), default=0.0)

    def _keep_loss(self, loss: Tensor) -> None:
        """Add the loss of a step, without waiting for the device."""
        if LOSS_RISE in self.elastic_pipeline.freeze.unfreeze:
            total, count = self._losses
            self._losses = total + loss.detach().double(), count + 1

    def _take_losses(self) -> float | None:
        (total, count), self._losses = self._losses, (0.0, 0)
        return float(total) / count if count else None

    def _gradient_norms(self) -> Sequence[float] | None:
        return None if self._norms is None else self._norms.take(self._consensus)

    def _intervals_before(self, step: int) -> int:
        """Return the number of intervals completed before a step."""
        if self.elastic_pipeline.freeze.interval == EPOCH and step in self._epochs_at:
            return self._epochs_at[step]
        samples = None if self.training_data is None else len(self.training_data)
        return completed_intervals(self.elastic_pipeline.freeze.interval, step, self.train_batch_size(), samples)

    # ----------------------------------------------------------------------------------------------------------- steps

    def _enter_training(self) -> None:
        super()._enter_training()
        for name, layer in layers_here(self.module).items():
            if name in self._prefix:
                layer.eval()

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        if self._norms is not None:
            tensor, add = 0, None
            if self.grid.model_parallel_size > 1:
                tensor, group = self.grid.get_slice_parallel_rank(), self.grid.slice_proc_group
                add = partial(torch.distributed.all_reduce, group=group)
            self._norms.add(self.module, tensor, add)
        super()._exec_optimizer_step(lr_kwargs)

    # --------------------------------------------------------------------------------------------------------- changes

    def _freeze(self, frozen: int) -> int:
        """Freeze the first ``frozen`` entries and unfreeze the others; return the bytes freed on this rank."""
        self._frozen, freed = frozen, 0
        prefix, module, optimizer = self._prefix, self.module, self.basic_optimizer
        self._say_tied()
        number_of = numbers(optimizer)
        aside = {}
        for name, parameter in module.named_parameters():
            if name.startswith(prefix) and parameter.requires_grad:
                parameter.requires_grad_(False)
                freed += 0 if parameter.grad is None else parameter.grad.numel() * parameter.grad.element_size()
                parameter.grad = None
                aside[name] = number_of.get(id(parameter), 0)
        if self.elastic_pipeline.freeze.unfreeze:
            # layers may move to other ranks before they are unfrozen
            for of_rank in self._consensus.gather(aside):
                self._aside |= of_rank
            self._take_back(prefix)
        return freed if optimizer is None else freed + release(optimizer)

    def _take_back(self, prefix: tuple[str, ...]) -> None:
        """Unfreeze parameters that are no longer in the prefix, with zero moments and step 0."""
        back = {name: group for name, group in self._aside.items() if not name.startswith(prefix)}
        self._aside = {name: group for name, group in self._aside.items() if name not in back}
        for name, parameter in self.module.named_parameters():
            if name in back:
                parameter.requires_grad_(True)
        if back and self.basic_optimizer is not None:
            number_of = numbers(self.basic_optimizer)
            here = {name: number_of[id(p)] for name, p in self.module.named_parameters() if id(p) in number_of}
            others = outside(self.basic_optimizer, self.module, self.param_names)
            refill(self.basic_optimizer, self.module, {**back, **here}, {}, outside=others)

    def _say_tied(self) -> None:
        specs = self.module._layer_specs
        tied = {spec.key for spec in specs[: self._frozen] if isinstance(spec, TiedLayerSpec)}
        later = tied & {spec.key for spec in specs[self._frozen :] if isinstance(spec, TiedLayerSpec)}
        if later - self._tied_frozen and self.global_rank == 0:
            names = ", ".join(sorted(later))
            logger.warning("elastic_pipeline.freeze: what is tied (%s) is frozen where it is used later, too", names)
        self._tied_frozen |= later
