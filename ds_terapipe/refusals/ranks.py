"""Errors of one rank, raised on all ranks; advice on legal but wasteful settings, logged on the first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ds_terapipe.config import AUTO, TOKEN_PIPELINE
from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.rules import above

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MESSAGE_BYTES = 1024


def advise(config: Mapping[str, Any], model: Any, cut: bool = True) -> None:
    """Log on rank 0 legal settings without a gain, and differences from DeepSpeed's own engine.

    Args:
        config: the DeepSpeed configuration.
        model: a ``PipelineModule``.
        cut: whether there is a block ``token_pipeline``.
    """
    if not _first_rank():
        return
    if cut and model.num_pipeline_stages() == 1:
        logger.warning("%s: the model has one pipeline stage, slices gain nothing; use num_stages >= 2", TOKEN_PIPELINE)
        _advise_unplanned(config.get(TOKEN_PIPELINE, {}))
    from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT

    clipping = config.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)
    if above(0)(clipping):
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
    if names and model.mpu().model_parallel_size > 1 and _first_rank():
        logger.warning(
            "%s ignored beside %s: a slice travels whole to every tensor-parallel rank; set to false to silence this",
            " and ".join(f"pipeline.{name}" for name in names),
            beside,
        )
    pipeline.update(pipe_partitioned=False, grad_partitioned=False)


def on_every_rank(model: Any, check: Callable[[], Result]) -> Result:
    """Run a check and raise any rank's finding on all ranks, so that none waits for a failed one.

    Args:
        model: a ``PipelineModule``; the ranks are those of its ``world_group``.
        check: run once on this rank.

    Returns:
        The result of ``check``.

    Raises:
        ConfigError: another rank's finding, in its words; this rank's own error is raised as it is.
    """
    failure: Exception | None = None
    try:
        result = check()
    except Exception as error:
        failure = error
    messages = _exchange(model, "" if failure is None else " ".join(str(failure).split()) or type(failure).__name__)
    if failure is not None:
        raise failure
    for message in messages:
        if message:
            raise ConfigError(message)
    return result


def _exchange(model: Any, message: str) -> list[str]:
    """Every rank's message, cut to ``MESSAGE_BYTES``, by one all-gather."""
    import torch
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().device_name(model.local_rank)
    encoded = message.encode("utf-8", errors="backslashreplace")[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    mine = torch.tensor(list(encoded), dtype=torch.uint8, device=device)
    received = [torch.empty_like(mine) for _ in range(model.world_size)]
    torch.distributed.all_gather(received, mine, group=model.world_group)
    return [bytes(each.tolist()).rstrip(b"\0").decode("utf-8", errors="ignore") for each in received]


def _first_rank() -> bool:
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
