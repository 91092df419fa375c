"""The refusal of our keys in accelerate's ``DeepSpeedPlugin``, which transformers' Trainer makes too.

accelerate would ask for ZeRO, or for another value than "auto", long before it calls ``deepspeed.initialize``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from .names import KEYS, is_on

MODULE = "accelerate.utils.dataclasses"


def cover_plugin() -> None:
    """Have the plugin raise for a configuration with our keys, if accelerate has been imported. A second call changes nothing."""
    plugin = getattr(sys.modules.get(MODULE), "DeepSpeedPlugin", None)
    if plugin is None or hasattr(plugin.__post_init__, "ds_terapipe_original"):
        return
    original = plugin.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        _refuse(self.hf_ds_config or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
        original(self)

    post_init.ds_terapipe_original = original  # type: ignore[attr-defined]
    plugin.__post_init__ = post_init


def _refuse(given: Any) -> None:
    """Raise ConfigError for the first block of ours that is on."""
    config = getattr(given, "config", given)
    if isinstance(config, str):
        try:
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError):  # accelerate's to explain
            return
    blocks = config if isinstance(config, Mapping) else {}
    found = next((key for key in KEYS if is_on(blocks, key)), None)
    if found is None and not _changes_batch(blocks.get("scheduler")):
        return
    from .errors import ConfigError

    caller = "transformers' Trainer" if "Trainer" in type(given).__name__ else "accelerate"
    if found is not None:
        raise ConfigError(
            f"{found}: got {caller}, which calls a whole model's forward and backward, must be a loop of engine.train_batch, "
            "use ds_terapipe.hf.pipeline and deepspeed.initialize (docs/how-to/from_trainer.md), or remove the key"
        )
    raise ConfigError(
        f"scheduler.params.phases: got several batch sizes and {caller}, whose batch stays the first, must be your own loop over "
        'engine.gradient_accumulation_steps() micro-batches, use deepspeed.initialize, or "LambWarmup"'
    )


def _changes_batch(scheduler: Any) -> bool:
    """Whether a scheduler is ``MixedBatch`` with phases of different batches or micro-batches."""
    if not isinstance(scheduler, Mapping) or scheduler.get("type") != "MixedBatch":
        return False
    from .optim.schedules.keys import MixedBatchKeys
    from .optim.schedules.phases import micro_batch_sizes

    phases = MixedBatchKeys.read(scheduler.get("params")).phases
    return len({(phase.batch_size, size) for phase, size in zip(phases, micro_batch_sizes(phases, 0), strict=True)}) > 1
