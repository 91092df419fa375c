"""Ends of a pipeline whose first or last stage is not on the first or last place.

DeepSpeed 0.19.8 asks an engine whether its rank is the first or last of the pipeline, and takes the loss from the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.overrides import override


def follow_places(engine: Any) -> None:
    """Have an engine, once it is built, answer by the places of its module's stages."""
    override(engine, "is_first_stage", lambda engine, original: ModelChunks(engine.module).has_first)
    override(engine, "is_last_stage", lambda engine, original: ModelChunks(engine.module).has_last)
    override(engine, "_loss_stage_global_rank", lambda engine, original: _rank_of_loss(engine))


@contextmanager
def by_place(engine: Any) -> Iterator[None]:
    """Context manager in which an engine answers by its rank's place: its constructor sends from each place to the next."""
    kept = {name: vars(engine).pop(name) for name in ("is_first_stage", "is_last_stage")}
    try:
        yield
    finally:
        vars(engine).update(kept)


def _rank_of_loss(engine: Any) -> int:
    return int(engine.grid.stage_to_global(ModelChunks(engine.module).places[-1]))
