"""The manifest of a checkpoint: size and checksum of every file, against which a file is checked before anything reads it.

The checksum has to be fast, not secret. A file is cut into blocks of 256 rows of 257 words, and the sums of the columns are
hashed. A changed word changes its column. The number of columns is prime, so a page or a sector that changes places with another
one, or that is zero, changes all columns. NumPy adds words about as fast as memory delivers them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ds_terapipe import tensor_files
from ds_terapipe.errors import ConfigError
from ds_terapipe.names import ELASTIC_STATE, KEYS, MANIFEST

_VERSION = 1
_ROWS, _COLUMNS = 256, 257  # half a megabyte stays in a core's cache between reading and adding
_USE = "use another checkpoint"


class Entry(NamedTuple):
    """A file as it was saved."""

    bytes: int
    checksum: str


def measured(path: Path) -> Entry:
    """Size and checksum of a file."""
    block = np.zeros((_ROWS, _COLUMNS), np.dtype("<u8"))
    window, size, digest = block.view(np.uint8).reshape(-1).data, 0, hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        while count := _fill(file, window):
            size += count
            window[count:] = bytes(len(window) - count)
            digest.update(block.sum(axis=0))
    return Entry(size, digest.hexdigest())


def _fill(file: Any, window: memoryview) -> int:
    """Read until the window is full or the file ends; network file systems may hand over less at a time."""
    filled = 0
    while filled < len(window) and (count := file.readinto(window[filled:])):
        filled += count
    return filled


@contextmanager
def measuring(writer: Any) -> Iterator[dict[str, Future[Entry]]]:
    """Measure each file that DeepSpeed's checkpoint engine ``writer`` saves, by path, in a thread, while the next one is written.

    A file is in the system's cache then, and its rank is the one that need not fetch it.
    """
    found: dict[str, Future[Entry]] = {}
    save = writer.save
    with ThreadPoolExecutor(1, "ds_terapipe-checksums") as pool:

        def saved(state_dict: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            result = save(state_dict, path, *args, **kwargs)
            found[str(path)] = pool.submit(measured, Path(path))
            return result

        writer.save = saved
        try:
            yield found
        finally:
            del writer.save


def entries_of(found: Mapping[str, Future[Entry]], folder: Path) -> dict[str, Entry]:
    """The results of :func:`measuring`, by name in the checkpoint's folder; without files that could not be read."""
    entries = {}
    for path, future in found.items():
        with suppress(OSError):
            entries[Path(path).relative_to(folder).as_posix()] = future.result()
    return entries


def write(folder: Path, known: Mapping[str, Entry]) -> None:
    """Write the manifest of a folder: of the files that are ``known``, and of all others there, which are measured now."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files = {**{name: measured(folder / name) for name in names if name not in known}, **known}
    said = {name: files[name]._asdict() for name in sorted(files)}
    text = json.dumps({"version": _VERSION, "files": said, "checksum": _of_text(said)}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _of_text(files: Any) -> str:
    return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=16).hexdigest()


class Manifest:
    """Sizes and checksums of a checkpoint's files when they were saved.

    Args:
        key: in whose name errors are raised.
        folder: of the checkpoint.
        files: by name in it.
    """

    def __init__(self, key: str, folder: Path, files: Mapping[str, Entry]) -> None:
        self._key, self._folder, self._files = key, folder, files

    @classmethod
    def of(cls, key: str, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint; None where there is none, as of DeepSpeed's own.

        Raises:
            ConfigError: it is damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            files = {name: Entry(**entry) for name, entry in said["files"].items()}
            whole = said["checksum"] == _of_text(said["files"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise ConfigError(f"{key}: got {path} that is damaged, must be as it was saved, {_USE}")
        return cls(key, folder, files)

    def check(self, paths: Iterable[Path]) -> None:
        """Refuse a file that is not as it was saved.

        Raises:
            ConfigError: the first one, and what is wrong with it; or that the manifest is of an earlier save.
        """
        for path in paths:
            problem = self._problem(path)
            if problem is not None and self._is_stale():
                stale = " and ".join(name for name in (MANIFEST, ELASTIC_STATE) if (self._folder / name).is_file())
                raise ConfigError(
                    f"{self._key}: got {path} of a later save than {MANIFEST} (DeepSpeed has saved here without our keys), must "
                    f"be of one save, use another tag, or remove {stale} to read what DeepSpeed saved"
                )
            if problem is not None:
                raise ConfigError(f"{self._key}: got {problem}, must be as it was saved, {_USE}")

    def names(self) -> Collection[str]:
        """The files that were saved."""
        return self._files.keys()

    def _problem(self, path: Path) -> str | None:
        name = path.relative_to(self._folder).as_posix()
        saved = self._files.get(name)
        if saved is None:
            return f"{path} that is not in {MANIFEST}" if path.exists() else f"no {path}"
        try:
            size = path.stat().st_size
            if size != saved.bytes:
                return f"{path} of {size} bytes in place of {saved.bytes}"
            found = measured(path)
        except FileNotFoundError:
            return f"no {path}"
        except OSError as error:
            return f"{path} that cannot be read ({error.strerror or error})"
        if found == saved:
            return None
        other = next((name for name, entry in self._files.items() if entry == found), None)
        return f"{path} with another checksum" if other is None else f"{path} with the content of {other}"

    def _is_stale(self) -> bool:
        """Whether DeepSpeed has saved here without our keys: its state files say so, and layers are younger than the manifest."""
        written = (self._folder / MANIFEST).stat().st_mtime_ns
        later = any(path.stat().st_mtime_ns > written for path in self._folder.glob("layer_*-model_states.pt"))
        return later and any(self._problem(path) and _by_others(path) for path in _states(self._folder))


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("mp_rank_*_model_states.pt"))


def _by_others(path: Path) -> bool:
    """Whether a state file has the configuration of an engine that was not ours."""
    try:
        config = tensor_files.read("", path)["ds_config"]
        blocks = [config.get(key) for key in KEYS]
    except (ConfigError, KeyError, TypeError, AttributeError):
        return False
    return not any(isinstance(block, Mapping) and block.get("enabled") is not False for block in blocks)
