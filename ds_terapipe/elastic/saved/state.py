"""The shape of the pipeline in a checkpoint: a small file beside DeepSpeed's, read before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.topology import ProcessTopology

from ds_terapipe.errors import ConfigError
from ds_terapipe.names import ELASTIC_STATE
from ds_terapipe.pipeline.saved_files import SavedFiles

_KEYS = (
    "frozen_layers", "stages", "parts", "layers", "processes", "tensor_parallel_size", "train_batch_size", "seed", "norms",
    "policy",
)  # fmt: skip


def read(folder: Path) -> dict[str, Any] | None:
    """Read a checkpoint's file after checking its bytes; None if it was saved without one.

    Raises:
        ConfigError: the folder is missing, or the file is damaged or invalid.
    """
    SavedFiles(folder).check_bytes_of([ELASTIC_STATE])
    path = folder / ELASTIC_STATE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"load_checkpoint: got {path} ({error}), must be JSON, use another checkpoint") from error
    missing = set(_KEYS) - set(found) if isinstance(found, dict) else set(_KEYS)
    if not missing and isinstance(found["stages"], int):
        found.setdefault("places", [*range(found["stages"])])  # older checkpoints have one stage on each place
    if missing or not _are_parts(found["parts"], found["stages"], found["layers"], found.get("places")):
        what = f"without {min(missing)}" if missing else "whose parts are none"
        raise ConfigError(
            f"load_checkpoint: got {path} {what}, must be a file of this checkpoint, use another checkpoint"
        )
    return dict(found)


def _are_parts(parts: Any, stages: Any, layers: Any, places: Any) -> bool:
    """Whether these are the first entry of each stage and, last, the number of layers; on so many places."""
    if not isinstance(parts, list) or not isinstance(places, list):
        return False
    if not all(isinstance(part, int) for part in [*parts, *places, stages, layers]) or {*places} != {*range(stages)}:
        return False
    return len(parts) == len(places) + 1 and [parts[0], parts[-1]] == [0, layers] and parts == sorted(parts)


def check(state: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a checkpoint that this engine cannot resume from.

    Args:
        state: state of the checkpoint.
        now: state of the engine, with the same keys.

    Raises:
        ConfigError: in one line.
    """
    for key in ("layers", "tensor_parallel_size", "train_batch_size"):
        if state[key] != now[key]:
            raise ConfigError(
                f"load_checkpoint: got a checkpoint with {key} {state[key]}, must be {now[key]} as this engine has it, use "
                f"{state[key]} or another checkpoint"
            )
    if state["frozen_layers"] < now["frozen_layers"]:
        raise ConfigError(
            f"load_checkpoint: got a checkpoint with {state['frozen_layers']} frozen layers, must be at least the "
            f"{now['frozen_layers']} that are frozen now, use a new engine"
        )


def resized(topology: ProcessTopology, stages: int) -> ProcessTopology:
    """Return a topology with the same axes and processes, but another number of stages."""
    sizes = {"pipe": stages, "data": topology.get_dim("pipe") * topology.get_dim("data") // stages}
    names = topology.get_axis_names()
    return ProcessTopology(axes=names, dims=[sizes.get(name, topology.get_dim(name)) for name in names])
