"""The manifest of a checkpoint: size and checksum of every file, against which a file is checked before anything reads it.

``torch.save`` writes a ZIP archive, whose directory has a CRC-32 of each record, computed while it was written. A file's checksum
is a hash over these and over all bytes between the records, so saving reads next to nothing again. A check computes the CRCs from
the records themselves.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from zlib_ng import zlib_ng

from ds_terapipe import tensor_files
from ds_terapipe.errors import ConfigError, one_line
from ds_terapipe.names import ELASTIC_STATE, KEYS, MANIFEST
from ds_terapipe.overrides import replaced

_VERSION = 2
_BLOCK = 1 << 20  # stays in a core's cache between reading and summing
_LOCAL_HEADER, _LENGTHS_AT = 30, 26  # of a ZIP record: name and extra field follow it, their lengths are at its end
_USE = "use another checkpoint"


class Entry(NamedTuple):
    """Entry of a file as it was saved."""

    bytes: int
    checksum: str


class _Record(NamedTuple):
    """The content of a record: where it begins, its length, and its CRC-32 by the archive's directory."""

    start: int
    bytes: int
    crc: int


def measured(path: Path, *, just_saved: bool = False) -> Entry:
    """Size and checksum of a file.

    Args:
        path: of the file.
        just_saved: whether ``torch.save`` of this process has written it: then the CRCs in the archive are taken as they are.
    """
    trusted = just_saved and torch.serialization.get_crc32_options()
    digest, at = hashlib.blake2b(digest_size=16), 0
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        for record in [*_records(file), None]:
            gap = (size if record is None else record.start) - at
            digest.update(_crc(file, at, gap).to_bytes(4, "big"))
            if record is not None:
                crc = record.crc if trusted else _crc(file, record.start, record.bytes)
                digest.update(crc.to_bytes(4, "big"))
                at = record.start + record.bytes
    return Entry(size, digest.hexdigest())


def _records(file: Any) -> list[_Record]:
    """The records of an uncompressed archive, by their place; none of another file, or of an archive that is damaged."""
    found = []
    try:
        for info in zipfile.ZipFile(file).infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                return []
            file.seek(info.header_offset + _LENGTHS_AT)
            name, extra = struct.unpack("<HH", file.read(4))
            found.append(_Record(info.header_offset + _LOCAL_HEADER + name + extra, info.file_size, info.CRC))
    except Exception:  # a damaged directory raises anything
        return []
    return sorted(found)


def _crc(file: Any, start: int, count: int) -> int:
    """Return the CRC-32 of ``count`` bytes, or of fewer if the file ends earlier."""
    window, crc = memoryview(bytearray(min(_BLOCK, max(count, 0)))), 0
    file.seek(start)
    while count > 0 and (read := file.readinto(window[:count])):
        crc = zlib_ng.crc32(window[:read], crc)
        count -= read
    return crc


@dataclass
class Saved:
    """Files that DeepSpeed's checkpoint engine has saved, and the error of one that it could not write."""

    files: list[Path] = field(default_factory=list)
    error: ConfigError | None = None


@contextmanager
def saving(writer: Any) -> Iterator[Saved]:
    """Context manager that notes the files which DeepSpeed's checkpoint engine ``writer`` saves.

    An error, as of a full disk, is kept for an agreement, and no further file is written: other ranks wait in barriers of
    DeepSpeed's for this one.
    """
    found = Saved()
    save = writer.save

    def saved(state_dict: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if found.error is not None:
            return None
        found.files.append(Path(path))
        try:
            return save(state_dict, path, *args, **kwargs)
        except Exception as problem:
            Path(path).unlink(missing_ok=True)
            free = shutil.disk_usage(Path(path).parent).free
            found.error = ConfigError(
                f"save_checkpoint: got {path} that cannot be written ({one_line(problem)}; {free / 1e9:.2f} GB are free), must "
                "be values that pickle knows, on a disk with room, use another folder or client_state"
            )
            found.error.__cause__ = problem

    with replaced(writer, save=saved):
        yield found


def entries_of(saved: Iterable[Path], folder: Path) -> dict[str, Entry]:
    """The entries of files that this process has saved, by name in the checkpoint's folder; without unreadable ones."""
    entries = {}
    for path in saved:
        with suppress(OSError):
            entries[path.relative_to(folder).as_posix()] = measured(path, just_saved=True)
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
        """Return the manifest of a checkpoint; None for DeepSpeed's own, or one with other checksums.

        Raises:
            ConfigError: it is damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            files = {name: Entry(**entry) for name, entry in said["files"].items()}
            whole, version = said["checksum"] == _of_text(said["files"]), said["version"]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise ConfigError(f"{key}: got {path} that is damaged, must be as it was saved, {_USE}")
        return cls(key, folder, files) if version == _VERSION else None

    def check(self, paths: Iterable[Path]) -> None:
        """Refuse a file that is not as it was saved.

        Raises:
            ConfigError: for the first one, with the reason; or for a manifest of an earlier save.
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
        """Whether DeepSpeed has saved here without our keys: by its state files, and layers newer than the manifest."""
        written = (self._folder / MANIFEST).stat().st_mtime_ns
        later = any(path.stat().st_mtime_ns > written for path in self._folder.glob("layer_*-model_states.pt"))
        states = sorted(self._folder.glob("mp_rank_*_model_states.pt"))
        return later and any(self._problem(path) and _by_others(path) for path in states)


def _by_others(path: Path) -> bool:
    """Whether a state file has the configuration of an engine that was not ours."""
    try:
        config = tensor_files.read("", path)["ds_config"]
        blocks = [config.get(key) for key in KEYS]
    except (ConfigError, KeyError, TypeError, AttributeError):
        return False
    return not any(isinstance(block, Mapping) and block.get("enabled") is not False for block in blocks)
