"""Advice on legal but wasteful settings, logged on the first rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ds_terapipe.config import AUTO, TOKEN_PIPELINE
from ds_terapipe.errors import shown
from ds_terapipe.job import Job
from ds_terapipe.rules import above

logger = logging.getLogger(__name__)


def advise(config: Mapping[str, Any], model: Any, cut: bool = True) -> None:
    """Log on rank 0 legal settings without a gain, and differences from DeepSpeed's own engine.

    Args:
        config: the DeepSpeed configuration.
        model: a ``PipelineModule``.
        cut: whether there is a block ``token_pipeline``.
    """
    if not Job.current().is_first:
        return
    if cut and model.num_pipeline_stages() == 1:
        logger.warning("%s: the model has one pipeline stage, slices gain nothing; use num_stages >= 2", TOKEN_PIPELINE)
        _advise_unplanned(config.get(TOKEN_PIPELINE, {}))
    from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT

    from ds_terapipe.optim.engine_hooks import is_sharded

    clipping = config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)
    if above(0)(clipping) and model.num_pipeline_stages() > 1 and not is_sharded(config, pipeline=True):
        logger.warning(
            "%s: %s%s clips by the true norm over all pipeline stages here; DeepSpeed's own engine counts the first stage "
            "only, so a clipped run differs from one without ds_terapipe",
            GRADIENT_CLIPPING,
            shown(clipping),
            "" if GRADIENT_CLIPPING in config else " (DeepSpeed's default)",
        )


def _advise_unplanned(block: Mapping[str, Any]) -> None:
    """Log which keys of the block ``token_pipeline`` only a plan would read, where the model has one stage."""
    names = [name for name in ("granularity", "memory_gb", "measurements_path") if block.get(name) is not None]
    if names and block.get("slices", AUTO) == AUTO and block.get("plan_path") is None:
        logger.warning(
            "%s.%s: nothing is planned with one pipeline stage, leave out what only a plan reads",
            TOKEN_PIPELINE,
            ", ".join(names),
        )


def turn_off_partitioning(pipeline: dict[str, Any], model: Any, beside: str = TOKEN_PIPELINE) -> None:
    """Set ``pipe_partitioned`` and ``grad_partitioned`` to False, with one warning where they would have counted.

    Args:
        pipeline: the block ``pipeline`` as ``DeepSpeedConfig`` has filled it in; changed in place, it is no user's.
        model: a ``PipelineModule``.
        beside: the block that the user has written, for the warning.
    """
    names = [name for name in ("pipe_partitioned", "grad_partitioned") if pipeline.get(name)]
    if names and model.mpu().model_parallel_size > 1 and Job.current().is_first:
        logger.warning(
            "%s ignored beside %s: a slice travels whole to every tensor-parallel rank; set to false to silence this",
            " and ".join(f"pipeline.{name}" for name in names),
            beside,
        )
    pipeline.update(pipe_partitioned=False, grad_partitioned=False)
