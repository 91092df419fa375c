"""Change of an engine's slices between steps."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from ds_terapipe.config import SEVERAL_RULES, TOKEN_PIPELINE, TokenPipelineConfig
from ds_terapipe.errors import ConfigError, shown
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.refusals import check_config, check_model, cuts
from ds_terapipe.rules import check


def set_slices(engine: Any, slices: int | Sequence[int] | str, schedule: str | None) -> None:
    """Change an engine's slices from the next step on; see ``TokenPipelineEngine.set_slices``; collective."""
    before, consensus = engine._token_pipeline, engine._consensus
    settings = _changed(before, slices, schedule, consensus)
    if cuts(settings.slices):
        consensus.together(lambda: _check_cut(engine, settings))
        engine._runtime.intercept()
    engine._token_pipeline = settings
    try:
        engine._begin_slicing()
    except BaseException:
        engine._token_pipeline = before
        raise
    consensus.config_hash = hash_of(settings)
    engine._trace.describe(slices=settings.slices, schedule=settings.schedule)


def hash_of(settings: TokenPipelineConfig) -> int:
    """Hash the settings, which must be the same on all ranks."""
    return zlib.crc32(repr(sorted(settings.model_dump().items())).encode())


def _check_cut(engine: Any, settings: TokenPipelineConfig) -> None:
    """Raise ConfigError if the engine has something that only works while nothing is cut."""
    config = {**engine._config._param_dict, TOKEN_PIPELINE: settings.model_dump()}
    check_config(config)
    check(SEVERAL_RULES, config)
    check_model(engine.module)


def _changed(
    settings: TokenPipelineConfig, slices: int | Sequence[int] | str, schedule: str | None, consensus: Consensus
) -> TokenPipelineConfig:
    """Return the settings with other slices and, unless it is None, another schedule; collective.

    Raises ConfigError on every rank for a bad value, or different values between ranks.
    """
    values = {
        **settings.model_dump(),
        "slices": slices,
        "schedule": settings.schedule if schedule is None else schedule,
    }
    changed = consensus.together(lambda: TokenPipelineConfig(**values))
    said = consensus.gather((changed.slices, changed.schedule))
    for rank, theirs in zip(consensus.job.ranks, said, strict=True):
        for name, value, first in zip(("slices", "schedule"), theirs, said[0], strict=True):
            if value != first:
                raise ConfigError(
                    f"token_pipeline.{name}: got {shown(value)} on rank {rank} and {shown(first)} on rank 0, must be the same on "
                    "all, use engine.set_slices with the same values on every rank"
                )
    return changed
