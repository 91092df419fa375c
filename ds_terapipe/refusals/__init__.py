"""Refusals by name, before an engine exists: settings that token slices, FusedLamb or DeepSpeed cannot use.

Every finding names the key or the layer, the reason and the way out. A layer lives on one stage only, so what one rank
finds is raised by all (`Job.together`).
"""

from __future__ import annotations

from ds_terapipe.refusals.configuration import LAMB_RULES, check_checkpointing, check_config, check_hardware_queue, cuts
from ds_terapipe.refusals.deepspeed_keys import check_keys
from ds_terapipe.refusals.models import check_model, check_model_class, has_own_forward
from ds_terapipe.refusals.ranks import advise, turn_off_partitioning
