"""Rebuild of DeepSpeed's engine around an optimizer and a scheduler that stay.

DeepSpeed's wrappers, communication counters and groups belong to one shape, so its constructor makes all of them again.
The state of the training is restored afterwards.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any

from deepspeed.monitor.config import get_monitor_config
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger as deepspeed_logger

from ds_terapipe.elastic.moves.layers import random_states_kept
from ds_terapipe.elastic.policies.resize import Shape
from ds_terapipe.overrides import replaced
from ds_terapipe.pipeline.ends import by_place
from ds_terapipe.pipeline.teardown import remove_hooks

# Attributes that a rebuilt engine keeps; a test lists the others that DeepSpeed's constructor sets.
CARRIED = (
    "global_steps", "global_samples", "micro_steps", "skipped_steps", "monitor", "timers", "tput_timer", "batch_timer",
    "training_data", "training_dataloader", "data_iterator", "batch_fn", "has_attention_mask", "_global_grad_norm",
    "loaded_checkpoint_mp_world_size", "loaded_checkpoint_dp_world_size", "client_optimizer", "client_lr_scheduler",
    "agg_train_loss", "_python_gc_generation",
)  # fmt: skip


def rebuild_engine(engine: Any, shape: Shape, arguments: Mapping[str, Any], wrap: Callable[[Any, Any], Any]) -> None:
    """Run the constructor of ``PipelineEngine`` again, on a module of another shape; collective.

    Args:
        engine: keeps its optimizer and scheduler.
        shape: the module's.
        arguments: arguments of the first call.
        wrap: returns the optimizer in DeepSpeed's wrapper; called with it and the wrapper so far.
    """
    outlives = {name: getattr(engine, name) for name in CARRIED if hasattr(engine, name)}
    batch = {
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_accumulation_steps": shape.micro_batches,
    }
    grid = engine.module.mpu()
    remove_hooks(engine)
    p2p._grid = None
    with quietly(), random_states_kept(engine.device), by_place(engine), _keeping(engine, wrap):
        config = DeepSpeedConfig({**engine._config._param_dict, **batch}, grid)
        config.pipeline.update(pipe_partitioned=False, grad_partitioned=False)
        monitored, config.monitor_config = config.monitor_config, get_monitor_config({})  # its writers exist
        again = {"optimizer": engine.client_optimizer, "training_data": None, "config_class": config, "mpu": grid}
        PipelineEngine.__init__(engine, **{**arguments, **again})
    config.monitor_config = monitored
    for name, value in outlives.items():
        setattr(engine, name, value)


def _keeping(engine: Any, wrap: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """Context manager in which a constructor keeps optimizer, scheduler and weights instead of making them."""
    before, basic_optimizer, scheduler = engine.optimizer, engine.basic_optimizer, engine.lr_scheduler

    def configure_optimizer(*_: Any) -> None:
        engine.basic_optimizer = basic_optimizer
        engine.optimizer = wrap(basic_optimizer, before)

    return replaced(
        engine,
        _configure_optimizer=configure_optimizer,
        _configure_lr_scheduler=lambda: setattr(engine, "lr_scheduler", scheduler),
        _broadcast_model=lambda: None,
    )


@contextmanager
def quietly() -> Iterator[None]:
    """Context manager that silences DeepSpeed while it builds an engine, an optimizer or a grid."""
    level = deepspeed_logger.level
    deepspeed_logger.setLevel(max(level, logging.WARNING))
    # it collects garbage, for about a second each time
    no_report = replaced(bf16_optimizer, see_memory_usage=lambda *_, **__: None)
    try:
        with redirect_stdout(io.StringIO()), no_report:
            yield
    finally:
        deepspeed_logger.setLevel(level)
