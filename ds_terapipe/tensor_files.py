"""Reader of files that ``torch.save`` has written, for direct access to a checkpoint."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from ds_terapipe.errors import ConfigError, one_line


def read(key: str, file: Path, *, mapped: bool = True, proven: bool = False) -> Any:
    """The content of a file, on the CPU.

    Args:
        key: in whose name errors are raised.
        file: to be read.
        mapped: whether tensors stay on the disk until they are used.
        proven: whether the checksums that ``torch.save`` put into it are compared: the whole file is read for that.

    Raises:
        ConfigError: a file that is damaged, cut short or none.
    """
    try:
        if proven and zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as records:
                damaged = records.testzip()
            if damaged is not None:
                raise ValueError(f"another checksum of {damaged}")
        # DeepSpeed's checkpoint.checkpoint_serialization chooses the other form, which can't be mapped
        return torch.load(file, map_location="cpu", mmap=mapped and zipfile.is_zipfile(file), weights_only=False)
    except Exception as error:  # a pickle cut short raises anything
        raise ConfigError(
            f"{key}: got {file} ({one_line(error)}), must be a whole file, use another checkpoint"
        ) from error
