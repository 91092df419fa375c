"""What ``torch.save`` has written, for those who read a checkpoint's files themselves."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from ds_terapipe.errors import ConfigError


def read(key: str, file: Path, *, mapped: bool = True) -> Any:
    """The content of a file, on the CPU; ``mapped``: tensors stay on the disk until they are used.

    Raises:
        ConfigError: in the name of ``key``, a file that is cut short or none.
    """
    try:
        # DeepSpeed's checkpoint.checkpoint_serialization chooses the other form, which can't be mapped
        return torch.load(file, map_location="cpu", mmap=mapped and zipfile.is_zipfile(file), weights_only=False)
    except Exception as error:  # a pickle cut short raises anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ConfigError(f"{key}: got {file} ({why}), must be a whole file, use another checkpoint") from error
