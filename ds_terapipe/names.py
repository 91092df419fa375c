"""The keys and types of ds_config.json that are ours, and our files in a checkpoint. Like the hook that waits for DeepSpeed, it
imports nothing but the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = ("token_pipeline", "elastic_pipeline")
TYPES = {"optimizer": ("FusedLamb",), "scheduler": ("LambWarmup", "MixedBatch")}

# In the folder of a checkpoint.
ELASTIC_STATE = "elastic_pipeline.json"
MANIFEST = "ds_terapipe_manifest.json"
HF_FOLDER, HF_NAMES = "hf", "names.json"

PLACED_STATE = "ds_terapipe_places"
"""Key in DeepSpeed's files of a checkpoint: names of the optimizer's parameters, and the stages that read it without names."""

UNUSED = "ds_terapipe_nothing_of_this_group_is_here"
"""Name of a parameter that stands for a group which has none here: no layer, and none of its values count."""

# In the environment.
SAME_LOSS = "DS_TERAPIPE_SAME_LOSS"
QUEUES, LOADING = "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"


def is_on(config: Mapping[str, Any], key: str) -> bool:
    """Whether a configuration has a block, which may be none, without ``"enabled": false`` in it."""
    return key in config and not (isinstance(config[key], Mapping) and config[key].get("enabled") is False)
