"""The keys and types of ds_config.json that are ours, and our files. Standard library only: what hooks into DeepSpeed is, too."""

from __future__ import annotations

KEYS = ("token_pipeline", "elastic_pipeline")
TYPES = {"optimizer": ("FusedLamb",), "scheduler": ("LambWarmup", "MixedBatch")}

# In the folder of a checkpoint.
ELASTIC_STATE = "elastic_pipeline.json"
HF_FOLDER, HF_NAMES = "hf", "names.json"
