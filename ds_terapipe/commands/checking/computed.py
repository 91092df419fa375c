"""Bytes between steps by rule, for an engine that fake tensors cannot build."""

from __future__ import annotations

from typing import Any

from ds_terapipe.commands.checking.bytes import Kept
from ds_terapipe.plan.costs.analytic_memory import GRADIENT, OPTIMIZER, WEIGHT

_MOMENTS = {"sgd": 0, "lion": 1, "adagrad": 1}
_FULL = 4  # bytes of a 32-bit number


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
