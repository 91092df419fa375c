"""State of a ``loss_fn`` that is a module, in a checkpoint; DeepSpeed 0.19.8 only saves the layers.

Its file is named like a layer's, numbered after the last entry of the layer list; DeepSpeed's own reader ignores it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from torch import nn

from ds_terapipe import tensor_files
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.overrides import override

logger = logging.getLogger(__name__)


def keep_loss_state(engine: Any) -> None:
    """Have an engine save and load the state of its loss beside the layers."""
    override(engine, "module_state_dict", _module_state_dict)
    override(engine, "load_module_state_dict", _load_module_state_dict)


def _module_state_dict(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    save_loss(engine, engine._curr_ckpt_path)
    return found


def _load_module_state_dict(
    engine: Any, original: Callable[..., Any], checkpoint: Any, strict: bool = True, *args: Any, **kwargs: Any
) -> None:
    original(checkpoint, strict, *args, **kwargs)
    load_loss(engine, engine._curr_ckpt_path, strict)


def save_loss(engine: Any, folder: str) -> None:
    """Write the loss's state into the folder of a checkpoint, from the first replica of the last stage."""
    loss, checkpoints, path = engine.module.loss_fn, engine.checkpoint_engine, loss_file(engine.module, folder)
    if path is None or not engine.is_last_stage() or engine.grid.data_parallel_id != 0:
        return
    state = loss.state_dict()
    if checkpoints.preserves_storage_sharing():  # saving a view would save its whole base
        state = clone_tensors_for_torch_save(state)
    checkpoints.save(state_dict=state, path=str(path))


def load_loss(engine: Any, folder: str, strict: bool) -> None:
    """Load the loss's state from a checkpoint; if there is none, the loss stays as it is, and rank 0 says so."""
    loss, path = engine.module.loss_fn, loss_file(engine.module, folder)
    if path is None:
        return
    if path.is_file():
        loss.load_state_dict(tensor_files.read("load_checkpoint", path), strict=strict)
    elif engine.global_rank == 0:
        logger.warning("load_checkpoint: %s has no %s, the state of loss_fn, which stays as it is", folder, path.name)


def loss_file(module: Any, folder: str) -> Path | None:
    """Return the file of the loss in the folder of a checkpoint; None for a loss without state."""
    if not isinstance(module.loss_fn, nn.Module) or not module.loss_fn.state_dict():
        return None
    chunks = ModelChunks(module)
    return Path(chunks.file(folder, len(chunks.specs)))
