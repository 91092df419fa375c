"""The keys and types of ds_config.json that are ours. Standard library only: what hooks into DeepSpeed looks for them."""

from __future__ import annotations

KEYS = ("token_pipeline", "elastic_pipeline")
TYPES = {"optimizer": ("FusedLamb",), "scheduler": ("LambWarmup", "MixedBatch")}
