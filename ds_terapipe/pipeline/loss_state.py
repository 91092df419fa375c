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
from ds_terapipe.errors import ConfigError
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.overrides import override

logger = logging.getLogger(__name__)


def keep_loss_state(engine: Any) -> None:
    """Have an engine save and load the state of its loss beside the layers."""
    override(engine, "module_state_dict", _module_state_dict)
    override(engine, "load_module_state_dict", _load_module_state_dict)


def _module_state_dict(engine: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Write the loss's state into the folder of a checkpoint too, from the first replica of the last stage."""
    if getattr(engine, "_curr_ckpt_path", None) is None:
        raise ConfigError(
            "module_state_dict: got a call outside save_checkpoint, as of save_16bit_model, must be one within (the weights of "
            "a pipeline are files of its layers), use save_checkpoint"
        )
    found, loss, checkpoints = original(*args, **kwargs), engine.module.loss_fn, engine.checkpoint_engine
    path = loss_file(engine.module, engine._curr_ckpt_path)
    if path is not None and engine.is_last_stage() and engine.grid.data_parallel_id == 0:
        state = loss.state_dict()
        if checkpoints.preserves_storage_sharing():  # saving a view would save its whole base
            state = clone_tensors_for_torch_save(state)
        checkpoints.save(state_dict=state, path=str(path))
    return found


def _load_module_state_dict(
    engine: Any, original: Callable[..., Any], checkpoint: Any, strict: bool = True, *args: Any, **kwargs: Any
) -> None:
    """Load the loss's state from a checkpoint too; if there is none, the loss stays as it is, and rank 0 says so."""
    original(checkpoint, strict, *args, **kwargs)
    folder = engine._curr_ckpt_path
    path = loss_file(engine.module, folder)
    if path is not None and path.is_file():
        engine.module.loss_fn.load_state_dict(tensor_files.read("load_checkpoint", path), strict=strict)
    elif path is not None and engine.global_rank == 0:
        logger.warning("load_checkpoint: %s has no %s, the state of loss_fn, which stays as it is", folder, path.name)


def loss_file(module: Any, folder: str) -> Path | None:
    """Return the file of the loss in the folder of a checkpoint; None for a loss without state."""
    if not isinstance(module.loss_fn, nn.Module) or not module.loss_fn.state_dict():
        return None
    chunks = ModelChunks(module)
    return Path(chunks.file(folder, len(chunks.specs)))
