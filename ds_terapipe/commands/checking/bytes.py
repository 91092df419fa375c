"""Bytes that an engine keeps from step to step, by what they are: weights, gradients, the optimiser's state.

Storages are counted, each once, so that views of DeepSpeed's flat buffers count as these. It counts an engine with fake
tensors and one that trains alike. For an engine that fake tensors cannot build they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_terapipe.deepspeed_state import flat_gradients
from ds_terapipe.pipeline.storages import storage_bytes
from ds_terapipe.plan.costs.analytic_memory import GRADIENT, OPTIMIZER, WEIGHT

_MOMENTS = {"sgd": 0, "lion": 1, "adagrad": 1}
_FULL = 4  # bytes of a 32-bit number


class Kept(NamedTuple):
    """Bytes of a rank between steps."""

    weights: int
    gradients: int
    optimizer: int


def kept_by(engine: Any) -> Kept:
    """Return what an engine keeps; gradients are counted as they are before the optimiser steps.

    Args:
        engine: a DeepSpeed engine whose optimiser has its state.
    """
    module = engine.module
    weights = storage_bytes([*module.parameters(), *module.buffers()])
    inside = [] if engine.optimizer is None else list(_tensors_in(engine.optimizer))
    known = storage_bytes(inside)
    flat = flat_gradients(engine.optimizer)
    if flat:  # BF16_Optimizer: sums in fp32, the 16-bit gradients of a pass are dropped
        gradients = storage_bytes(flat)
        count = sum(gradients.values())
    else:
        gradients = storage_bytes(p.grad for p in module.parameters() if p.grad is not None)
        count = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    others = {key: size for key, size in known.items() if key not in weights and key not in gradients}
    return Kept(sum(weights.values()), count, sum(others.values()))


def computed_kept(module: Any, config: Any, replicas: int) -> Kept:
    """Return what a rank keeps by DeepSpeed's rules; Adam's two moments where the optimiser is not known.

    Args:
        module: a ``PipelineModule``.
        config: the configuration as DeepSpeed has read it.
        replicas: data-parallel ranks, which share the optimiser's state under ZeRO-1 and BF16_Optimizer.
    """
    count = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    half, bf16 = config.float16_config.enabled or config.bfloat16_config.enabled, config.bfloat16_config.enabled
    zero = int(config.zero_optimization_stage)
    moments = _MOMENTS.get((config.optimizer_name or "").lower(), 2)
    shards = replicas if zero or bf16 else 1
    if not half:
        return Kept(_FULL * count, _FULL * trained, (moments + bool(zero)) * _FULL * trained // shards)
    gradient = _FULL if bf16 and not zero else GRADIENT
    state = (OPTIMIZER - 2 * _FULL + moments * _FULL) * trained / shards
    return Kept(int(WEIGHT * count), int(gradient * trained), int(state))


def allocate_state(optimizer: Any) -> None:
    """Make the state of an optimiser that has none before its first step: it steps once, on fake gradients."""
    if optimizer is None or optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def two_moments(optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Make the state that `FusedLamb.step` makes: two moments in fp32; its kernels need bytes."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and "exp_avg" not in optimizer.state[parameter]:
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)


def _tensors_in(optimizer: Any, seen: frozenset[int] = frozenset()) -> Iterator[Tensor]:
    """Yield the tensors of an optimiser: its groups, its state, and those of the optimiser that it wraps."""
    for leaf in tree_leaves(vars(optimizer)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "param_groups") and id(leaf) not in seen:
            yield from _tensors_in(leaf, seen | {id(leaf)})
