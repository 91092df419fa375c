"""Checks before a training step that its gradients are made, and reach the optimizer."""

from __future__ import annotations

from typing import Any

import torch

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.parameter_groups import refuse_switched


def check_trains(engine: Any) -> None:
    """Refuse a training step without gradients, the same on all ranks.

    Raises:
        RuntimeError: gradients are disabled.
        ConfigError: no parameter of the model is trained.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
    if engine.placement.forward_only == len(engine.placement.stages):
        raise ConfigError(
            "model: got no parameter that is trained, must have one on some stage, use requires_grad_() or eval_batch()"
        )


def check_optimizer(engine: Any) -> None:
    """Refuse a missing optimizer, and a change of ``requires_grad`` without effect; this rank alone."""
    if engine.optimizer is None:
        raise ConfigError(
            "optimizer: got none on a rank that trains, must be one on every rank, also where a stage has nothing to "
            "train, use torch.optim.AdamW(model.parameters()) or an optimizer in the configuration"
        )
    check_switches(engine)


def check_switches(engine: Any) -> None:
    """Refuse a change of ``requires_grad`` since the runtime was built that would have no effect; this rank alone."""
    forward = (stage for stage in engine._runtime.stages.values() if not stage.trains)
    layers = (layer for stage in forward for layer in stage.layers.modules)
    if engine.basic_optimizer is not None:
        refuse_switched(engine._switches, engine.basic_optimizer, engine.optimizer, layers)
