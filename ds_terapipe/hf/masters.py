"""The fp32 masters in a checkpoint of a DeepSpeed pipeline, by parameter name.

ZeRO-1 and the bf16 optimizer write a file for each stage and replica: flat tensors, and which parameters are where in them.
DeepSpeed's ``zero_to_fp32.py`` does not put those of a pipeline together (0.19.8). The fp16 optimizers without ZeRO write masters
in the order of the parameters; a master is known there by its 16-bit value, which is the weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_terapipe.deepspeed_state import saved_masters, saved_partitions
from ds_terapipe.errors import ConfigError
from ds_terapipe.tensor_files import read

_PARTS = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_STAGE = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")


class Masters:
    """Looks up masters.

    Args:
        checkpoint: folder of one step.

    Raises:
        ConfigError: a file that is not whole, or none of DeepSpeed's.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._parts: dict[str, dict[int, list[tuple[int, Tensor]]]] = {}  # by name and stage: replica, elements
        self._flat: list[Tensor] = []
        for file in sorted(checkpoint.iterdir()):
            try:
                if found := _PARTS.search(file.name):
                    replica, stage = map(int, found.groups())
                    self._add_parts(read("export", file)["optimizer_state_dict"], stage, replica)
                elif _STAGE.match(file.name):
                    self._flat += saved_masters(read("export", file).get("optimizer"))
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"export: got {file} ({type(error).__name__}), must be DeepSpeed's, use another checkpoint"
                ) from error

    def _add_parts(self, state: Mapping[str, Any], stage: int, replica: int) -> None:
        for flat, places in saved_partitions(state):
            for name, elements in places.items():
                of_stage = self._parts.setdefault(name, {}).setdefault(stage, [])
                of_stage.append((replica, flat.view(-1)[elements]))

    def find(self, name: str, weight: Tensor) -> Tensor | None:
        """Return the master of a parameter, by its name in the ``PipelineModule``; None if there is none."""
        for of_stage in self._parts.get(name, {}).values():
            whole = torch.cat([part for _, part in sorted(of_stage, key=lambda one: one[0])])
            if whole.numel() == weight.numel():
                return whole.view(weight.shape)
        if not self._flat or weight.dtype != torch.float16:
            return None
        return self._next(weight, copies=name.startswith("tied_modules."))

    def _next(self, weight: Tensor, copies: bool) -> Tensor | None:
        """Return the next master in a group that rounds to this weight; ``copies``: another stage may have it, too."""
        count, found = weight.numel(), None
        for index, flat in enumerate(self._flat):
            if flat.numel() >= count and torch.equal(flat[:count].half(), weight.flatten()):
                self._flat[index] = flat[count:]
                found = flat[:count].view(weight.shape) if found is None else found
                if not copies:
                    break
        return found
