"""Record of the Hugging Face model in a pipeline's checkpoint: configuration, names of the weights, tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from transformers.core_model_loading import revert_weight_conversion

from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.source import Source
from ds_terapipe.names import HF_FOLDER, HF_NAMES

_VERSION = 1
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja")  # what a tokenizer consists of
_LARGEST = 64 * 2**20
_OF_A_MODEL = ("config.json", "generation_config.json")  # which is beside the adapter


def names_of(source: Source) -> list[dict[str, str]]:
    """Return for each entry of the layer list the prefixes of its weights' names, here and in the model."""
    parts = source.parts
    embed = {"tokens.": parts.tokens, "positions.": parts.positions, "dropout.": parts.dropout}
    layers = [{"layer.": f"{parts.layers}.{index}"} for index in range(source.config.num_hidden_layers)]
    norm = [{"norm.": parts.norm}] if parts.norm is not None else []
    head = [{}] if parts.tied else [{"head.": parts.head}]
    entries: list[dict[str, str | None]] = [embed, *layers, *norm, *head]  # type: ignore[list-item]
    return [{own: f"{name}." for own, name in entry.items() if name is not None} for entry in entries]


def saved_names(source: Source) -> dict[str, str]:
    """Return the names that transformers saves weights under, by those in the model, where the two differ."""
    of_model = source.model.state_dict() if source.adapter is None else {}
    owns = {id(tensor): own for own, tensor in of_model.items()}
    reverted = revert_weight_conversion(source.model, of_model)
    pairs = ((owns.get(id(tensor)), saved) for saved, tensor in reverted.items())
    return {own: saved for own, saved in pairs if own is not None and own != saved}


def write_record(source: Source, checkpoint: Path) -> None:
    """Write the record into a folder ``hf`` of a checkpoint."""
    folder = checkpoint / HF_FOLDER
    write_model(source, folder)
    prefixes = tuple(name for entry in names_of(source) for name in entry.values())
    weights = [] if source.adapter is not None else [n for n in source.model.state_dict() if n.startswith(prefixes)]
    record = {
        "version": _VERSION,
        "architecture": type(source.model).__name__,
        "tied": source.parts.tied,
        "entries": names_of(source),
        "adapter": None if source.adapter is None else source.adapter.names,
        "weights": weights,
        "saved": saved_names(source),
    }
    (folder / HF_NAMES).write_text(json.dumps(record, indent=1))


def write_model(source: Source, folder: Path) -> None:
    """Write configuration and generation settings, or those of the adapter; and the tokenizer's files of the model's folder."""
    config, generation = source.config, getattr(source.model, "generation_config", None) if source.given else None
    folder.mkdir(parents=True, exist_ok=True)
    origin = Path(str(getattr(config, "_name_or_path", "") or "."))
    if str(origin) != "." and origin.is_dir():
        for file in (file for pattern in _COMPANIONS for file in origin.glob(pattern)):
            if not file.name.endswith(".index.json") and file.stat().st_size <= _LARGEST:
                shutil.copyfile(file, folder / file.name)
    if source.adapter is not None:
        for name in _OF_A_MODEL:
            (folder / name).unlink(missing_ok=True)
        source.adapter.write_config(folder)
        return
    written = copy.deepcopy(config)
    written.tie_word_embeddings = source.parts.tied  # which a given model may have changed by hand
    if getattr(written, "layer_types", None) is not None:  # also of layers that were cut
        written.layer_types = written.layer_types[: written.num_hidden_layers]
    written.save_pretrained(folder)
    if generation is not None:
        generation.to_json_file(folder / _OF_A_MODEL[1])  # save_pretrained refuses some, when all is trained


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Read the record that :func:`write_record` wrote.

    Raises:
        ConfigError: there is none, a damaged one, or another version's.
    """
    file = checkpoint / HF_FOLDER / HF_NAMES
    if not file.is_file():
        raise ConfigError(
            f"export: got {checkpoint}, must be the folder of one step of a pipeline that ds_terapipe.hf.pipeline has built, use "
            "e.g. CHECKPOINTS/global_step100"
        )
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        record.update(entries=[dict(entry) for entry in record["entries"]], tied=bool(record["tied"]))
        record["adapter"] = dict(record.get("adapter") or {})  # older records have none
        record["weights"] = list(record.get("weights") or ())  # and not these
        record["saved"] = dict(record.get("saved") or {})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"export: got {file} ({type(error).__name__}), must be as it was saved, use another checkpoint"
        ) from error
    if record.get("version") != _VERSION:
        raise ConfigError(
            f"export: got version {record.get('version')} in {file}, must be {_VERSION}, use the ds_terapipe it is of"
        )
    return record
