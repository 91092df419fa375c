"""A pipeline's weights as a folder that ``from_pretrained`` reads: of a checkpoint, or of an engine that is there.

Of a model with an adapter that peft knows only the adapter is written, as a folder for ``PeftModel.from_pretrained``.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_terapipe.errors import ConfigError
from ds_terapipe.hf.adapters import VALUES
from ds_terapipe.hf.masters import Masters
from ds_terapipe.hf.record import names_of, read_record, saved_names, write_model
from ds_terapipe.hf.together import together
from ds_terapipe.hf.weights import INDEX, SINGLE
from ds_terapipe.job import Job
from ds_terapipe.json_files import check_writable
from ds_terapipe.manifest import Manifest
from ds_terapipe.model_chunks import ModelChunks
from ds_terapipe.names import ELASTIC_STATE, HF_FOLDER, HF_NAMES
from ds_terapipe.tensor_files import read

LARGEST = 5 * 10**9  # bytes of a shard, as transformers has it
# In names of peft's weights. transformers ignores them in a folder, and draws the layers that they stand for at random.
_ADAPTERS = (".base_layer.", ".lora_", ".original_module.", ".modules_to_save.")

Tensors = dict[str, Tensor]


class Written(NamedTuple):
    """A file of a folder: its name, the tensors in it, and the types of its floating point tensors."""

    name: str
    tensors: list[str]
    dtypes: list[torch.dtype]


def check_new(key: str, path: Path) -> None:
    """Raise ConfigError, in the name of ``key``, for a folder that cannot be written, before its content exists.

    Nothing is made but the folders above.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{key}: got {path}, must be a new folder or an empty one, use e.g. {path}-2")
    check_writable(key, path, "a folder that you may write to", "a folder that can be made")


class Folder:
    """A folder that is written beside its name, and given it when it is whole.

    Args:
        path: the name. There must be nothing under it.
        saved: names that tensors get in its files, by their own, where the two differ.

    Raises:
        ConfigError: there is something.
    """

    def __init__(self, path: Path, saved: Mapping[str, str]) -> None:
        check_new("export", path)
        self._saved = saved
        self.path, self.unfinished = path, path.parent / f".{path.name}.unfinished"

    def begin(self) -> None:
        """Have an empty folder to write to."""
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)

    def write(self, name: str, tensors: Tensors) -> Written:
        """A file of tensors."""
        tensors = {self._saved.get(own, own): value.contiguous() for own, value in tensors.items()}
        save_file(tensors, self.unfinished / name, {"format": "pt"})
        return Written(name, list(tensors), [value.dtype for value in tensors.values() if value.is_floating_point()])

    def finish(self, files: Sequence[Written], adapter: Mapping[str, str]) -> None:
        """Make the folder's files of the written ones, in their order, and rename the folder.

        ``adapter``: names of its tensors, by those that peft has for them; empty for a model.

        Raises:
            ConfigError: a tensor of the adapter is in no file.
        """
        if adapter:
            self._join(files, adapter)
        else:
            self._index(files)
        self.unfinished.rename(self.path)  # an empty folder there gives way

    def _index(self, files: Sequence[Written]) -> None:
        """Rename the files and write their index.

        The configuration gets the widest type that weights have: ``from_pretrained`` loads all in the one that stands there.
        """
        total, dtypes = 0, [dtype for file in files for dtype in file.dtypes]
        where: dict[str, str] = {}
        for number, (file, names, _) in enumerate(files, start=1):
            final = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            total += (self.unfinished / file).stat().st_size
            (self.unfinished / file).rename(self.unfinished / final)
            where |= dict.fromkeys(names, final)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (self.unfinished / INDEX).write_text(json.dumps(index, indent=2))
        file_of_config = self.unfinished / "config.json"
        widest = functools.reduce(torch.promote_types, dtypes)
        config = json.loads(file_of_config.read_text()) | {"dtype": str(widest).removeprefix("torch.")}
        file_of_config.write_text(json.dumps(config, indent=2) + "\n")

    def _join(self, files: Sequence[Written], adapter: Mapping[str, str]) -> None:
        """Make one file of an adapter's parts, which peft has no index for."""
        parts: Tensors = {}
        for file in files:
            parts |= load_file(self.unfinished / file.name)
        for name in adapter.values():
            if name not in parts:
                raise ConfigError(
                    f"export: got no {name} in the part of any stage, must be all {len(adapter)} tensors of the adapter, use a "
                    "checkpoint with all layers, or engine.save_checkpoint"
                )
        self.write(VALUES, {own: parts[name].clone() for own, name in adapter.items()})
        for file in files:
            (self.unfinished / file.name).unlink()


def export(checkpoint: str | Path, out: str | Path, dtype: torch.dtype | None = None, largest: int = LARGEST) -> Path:
    """Write the weights of a checkpoint as a folder for ``AutoModelForCausalLM.from_pretrained``; layer after layer.

    Args:
        checkpoint: folder of one step, of any stages, replicas and ZeRO-1, written by our engine or DeepSpeed's own.
        out: folder to be made; of a model with an adapter it has the adapter alone, for peft.
        dtype: of the weights; default: fp32 where the checkpoint has masters, else as they are.
        largest: bytes of a shard.

    Returns:
        ``out``.

    Raises:
        ConfigError: the checkpoint is of another model, lacks a layer or a part of a file, has adapters that it was not
            built with or a file that is not as it was saved; or there is something at ``out``.
    """
    checkpoint = Path(checkpoint)
    check_saved(checkpoint)
    record = read_record(checkpoint)
    folder = Folder(Path(out), record["saved"])
    missing = dict.fromkeys(record["weights"])
    for entry in range(len(record["entries"])):
        names = [_renamed(own, record["entries"][entry]) for own in _layer(checkpoint, record, entry)]
        _check_names("export", names, record["adapter"], "the checkpoint itself, with load_checkpoint")
        missing = {name: None for name in missing if name not in names}
    if missing:
        raise ConfigError(
            f"export: got no {next(iter(missing))} in {checkpoint}, must be all weights of the model, use save_checkpoint "
            "without exclude_frozen_parameters, or hf.save_pretrained"
        )
    masters = Masters(checkpoint)
    folder.begin()
    for file in (checkpoint / HF_FOLDER).iterdir():
        if file.name != HF_NAMES:
            shutil.copyfile(file, folder.unfinished / file.name)
    layers = (_of_layer(checkpoint, record, masters, entry, dtype) for entry in range(len(record["entries"])))
    files = [folder.write(f"{number}", tensors) for number, tensors in enumerate(_shards(layers, largest))]
    folder.finish(files, record["adapter"])
    return folder.path


def _check_names(key: str, names: Iterable[str], adapter: Mapping[str, str], use: str) -> None:
    """Raise ConfigError, in the name of ``key``, for a weight of an adapter, or of a layer beneath one, that is not known."""
    for name in () if adapter else names:
        if any(mark in name for mark in _ADAPTERS):
            raise ConfigError(
                f"{key}: got {name}, which is an adapter's, must be weights of the model alone, use {use}"
            )


def check_saved(checkpoint: Path) -> None:
    """Refuse a checkpoint with a manifest if a file that an export reads is missing or damaged.

    Raises:
        ConfigError: naming the file.
    """
    manifest = Manifest.of("export", checkpoint)
    if manifest is not None:
        manifest.check(checkpoint / name for name in sorted(manifest.names()) if name != ELASTIC_STATE)


def _layer(checkpoint: Path, record: Mapping[str, Any], entry: int) -> Tensors:
    """Return the file of an entry of the layer list; empty for a head without weights of its own."""
    if not record["entries"][entry]:
        return {}
    files = sorted(checkpoint.glob(f"layer_{entry:02d}-*model_states.pt"))
    if len(files) != 1:
        raise ConfigError(
            f"export: got {len(files)} files of layer {entry} in {checkpoint}, must be one, use a checkpoint that was written to "
            "its end"
        )
    found: Tensors = read("export", files[0])
    names = record["entries"][entry]
    if not isinstance(found, Mapping) or not all(_is_of(own, value, names) for own, value in found.items()):
        raise ConfigError(f"export: got {files[0]} of another layer, must be of entry {entry}, use another checkpoint")
    return found


def _of_layer(
    checkpoint: Path, record: Mapping[str, Any], masters: Masters, entry: int, dtype: torch.dtype | None
) -> Tensors:
    names = record["entries"][entry]
    prefix = "tied_modules.embed." if entry == 0 and record["tied"] else f"{entry}."
    wanted = set(record["adapter"].values())
    found = {}
    for own, weight in _layer(checkpoint, record, entry).items():
        if wanted and _renamed(own, names) not in wanted:
            continue
        master = masters.find(prefix + own, weight)
        value = weight if master is None else master
        converts = dtype is not None and value.is_floating_point()
        found[_renamed(own, names)] = value.to(dtype) if converts else value.clone()
    return found


def _is_of(own: Any, value: Any, names: Mapping[str, str]) -> bool:
    return isinstance(value, Tensor) and any(str(own).startswith(beginning) for beginning in names)


def _renamed(own: str, names: Mapping[str, str]) -> str:
    beginning = next(one for one in names if own.startswith(one))
    return names[beginning] + own.removeprefix(beginning)


def _shards(layers: Iterator[Tensors], largest: int) -> Iterator[Tensors]:
    """Yield the layers' tensors in shards of at most so many bytes."""
    shard: Tensors = {}
    size = 0
    for tensors in layers:
        for name, tensor in tensors.items():
            more = tensor.numel() * tensor.element_size()
            if shard and size + more > largest:
                yield shard
                shard, size = {}, 0
            shard[name], size = tensor, size + more
    yield shard


def save_pretrained(engine: Any, out: str | Path, dtype: torch.dtype | None = None, largest: int = LARGEST) -> Path:
    """Write the weights that an engine trains as a folder for ``AutoModelForCausalLM.from_pretrained``; every process calls it.

    Of a model with an adapter it has the adapter alone, for ``PeftModel.from_pretrained``.

    Args:
        engine: of DeepSpeed or ours, with a :class:`DecoderPipeline`.
        out: folder to be made, which all processes see.
        dtype, largest: as for :func:`export`.

    Returns:
        ``out``.

    Raises:
        ConfigError: on every process, where one can't write, or has adapters that the model was not built with.
    """
    module, job = engine.module, Job.current()
    adapter = {} if module.source.adapter is None else module.source.adapter.names

    def begin() -> Folder:
        names = (_renamed(own, names) for names, layer in _live_layers(module) for own in layer.state_dict())
        _check_names("hf.save_pretrained", names, adapter, "engine.save_checkpoint, which keeps them")
        return Folder(Path(out), saved_names(module.source))

    folder = together(begin)
    together(lambda: folder.begin() if job.is_first else None)
    writes, stage = engine.grid.data_parallel_id == 0, engine.grid.get_stage_id()
    layers = _live(module, dtype, set(adapter.values()))

    def write() -> list[Written]:
        found = []
        try:
            for number, tensors in enumerate(_shards(layers, largest)):
                if writes and tensors:
                    found.append(folder.write(f"{stage:04}-{number:05}", tensors))
        finally:
            for _ in layers:  # what is left of masters that replicas share, and put together all at once
                pass
        return found

    everywhere = job.gather(together(write))
    files = sorted((file for of_rank in everywhere for file in of_rank), key=lambda file: file.name)

    def finish() -> None:
        if job.is_first:
            write_model(module.source, folder.unfinished)
            folder.finish(files, adapter)

    together(finish)
    return folder.path


def _live_layers(module: Any) -> Iterator[tuple[dict[str, str], Any]]:
    """Yield this stage's layers with their own weights, and the prefixes of the weights' names."""
    names = names_of(module.source)
    for index, layer in ModelChunks(module).functions.items():
        if names[index] and hasattr(layer, "state_dict"):
            yield names[index], layer


def _live(module: Any, dtype: torch.dtype | None, wanted: Collection[str]) -> Iterator[Tensors]:
    """Yield the tensors of this stage's layers, in order, all or ``wanted`` ones; a tied head has no weights of its own."""
    for names, layer in _live_layers(module):
        parameters, found = dict(layer.named_parameters()), {}
        for own, value in layer.state_dict().items():
            if wanted and _renamed(own, names) not in wanted:
                continue
            master = safe_get_full_fp32_param(parameters[own]) if own in parameters else None
            value = (value if master is None else master.view(value.shape)).detach().cpu()
            found[_renamed(own, names)] = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        yield found
