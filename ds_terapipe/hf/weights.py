"""Weights of a Hugging Face folder, read by name: a process opens the shards that have its own layers, and copies only these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_terapipe.errors import ConfigError, one_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_WANTED = ("*.safetensors", INDEX, "*.json", "*.txt", "*.model", "*.jinja")


def folder_of(name: str, revision: str | None, key: str = "hf.pipeline") -> Path:
    """The folder itself, or of a model on the Hub its copy here, which is fetched where it is missing.

    Raises:
        ConfigError: there is none.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except Exception as problem:
        raise ConfigError(
            f'{key}: got "{name}", must be a folder that is there or a model on the Hub, use e.g. "Qwen/Qwen3-0.6B" '
            f"({one_line(problem)})"
        ) from problem


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights in safetensors, or an index of them."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


class Weights:
    """The tensors of a folder.

    Args:
        folder: with one file or several and their index.
        renamed: a name in the folder to that in the model; older folders have others, or leave out the base model's prefix.

    Attributes:
        names: of the tensors in the folder, by those that they have in the model.

    Raises:
        ConfigError: there is no such file, or the index can't be read.
    """

    def __init__(self, folder: Path, renamed: Callable[[str], str]) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            try:
                self._files: dict[str, str] = dict(json.loads((folder / INDEX).read_text())["weight_map"])
            except (ValueError, KeyError, OSError) as problem:
                raise _bad(folder / INDEX, problem) from problem
        elif (folder / SINGLE).is_file():
            self._files = {}
            self._files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise ConfigError(
                f"hf.pipeline: got {folder} without {SINGLE} or {INDEX}, must be weights in safetensors, use "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
            )
        self.names = {renamed(name): name for name in self._files}

    def check(self, wanted: Iterable[tuple[str, Tensor]]) -> None:
        """See that tensors of these names and shapes are there, without reading them.

        Raises:
            ConfigError: one is not, or its file is damaged.
        """
        for name, like in wanted:
            file, known = self._find(name)
            shape = self._open(file).get_slice(known).get_shape()
            if tuple(shape) != tuple(like.shape):
                raise ConfigError(
                    f"hf.pipeline: got {known} of shape {list(shape)} in {self.folder / file}, must be {list(like.shape)}, use "
                    "the configuration that the weights are of"
                )

    def read(self, name: str) -> Tensor:
        """A tensor, by the name that the model has for it."""
        file, known = self._find(name)
        found: Tensor = self._open(file).get_tensor(known)
        return found

    def _find(self, name: str) -> tuple[str, str]:
        if name in self.names:
            return self._files[self.names[name]], self.names[name]
        raise ConfigError(
            f"hf.pipeline: got no {name} in {self.folder}, must have all weights of the model, use the configuration that they "
            "are of"
        )

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = open_file(self.folder / file)
        return self._opened[file]


def open_file(file: Path) -> Any:
    """Open a file of safetensors.

    Raises:
        ConfigError: it is missing or damaged.
    """
    from safetensors import safe_open

    try:
        return safe_open(file, framework="pt")
    except Exception as problem:
        raise _bad(file, problem) from problem


def _bad(file: Path, problem: BaseException) -> ConfigError:
    what = "missing" if not file.exists() else f"damaged ({one_line(problem)})"
    return ConfigError(f"hf.pipeline: got {file} that is {what}, must be whole, use a new copy of it")
