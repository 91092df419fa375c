"""Entries of a cache as files: bytes under a name, in the machine's memory first, then on a disk.

An entry is written to a temporary file and renamed, so it exists whole or not at all. Its checksum is verified when it
is read; a damaged entry counts as missing. Files are written and read, never mapped: on a full tmpfs a write raises
ENOSPC, which can be handled, while touching a mapping ends the process by SIGBUS.

Entries stay until their level ends, or other samples come. If there is no room for all, the existing entries serve
their share of every epoch; with replacement, each would be gone before its turn.

Every process of a run holds a lock on its folder. A folder without a lock belongs to a dead run: the next run removes
it, unless it resumes that run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LOCK, _USED = "lock", "used"
_HEADER = struct.Struct("<4sI16sQ")  # magic, checksum, hash of the name, number of bytes that follow
_MAGIC = b"DTC1"


class Tier:
    """Entries of a run in one folder.

    Args:
        root: folder of all runs.
        run: name of this run.
        limit: limit in bytes of this run's entries, over all processes of the machine; None: no limit.

    Attributes:
        root: the argument.
        full: whether the last write did not fit.
    """

    def __init__(self, root: Path, run: str, limit: int | None) -> None:
        self.root, self.path, self.limit = root, root / run, limit
        self.full = False
        self._mutex = threading.Lock()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # outputs may reveal the user's data
        with _locked(root / _LOCK):  # so that a new run does not take this one for a dead run
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
            alone = _try_lock(self._lock, fcntl.LOCK_EX)
            if alone:  # the first process, maybe after a crash: no other process is writing
                self._recount()
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            _remove_dead(root)

    def read(self, name: str) -> memoryview | None:
        """Return the bytes written under a name; None if they are missing or damaged."""
        try:
            with open(self.path / name, "rb") as file:
                data = memoryview(file.read())
        except OSError:
            return None
        if len(data) < _HEADER.size:
            return None
        magic, checksum, of, count = _HEADER.unpack_from(data)
        found = data[_HEADER.size :]
        if magic != _MAGIC or count != len(found) or of != _named(name) or checksum != zlib.crc32(found):
            return None
        return found

    def write(self, name: str, parts: Sequence[Any]) -> bool:
        """Write an entry, or replace it; return False if there is no room.

        Args:
            name: the part before the last slash is a folder, created if missing.
            parts: its bytes, in order.
        """
        path = self.path / name
        size = _HEADER.size + sum(len(part) for part in parts)
        try:
            old = path.stat().st_size
        except OSError:
            old = 0
        self.full = not self._count(size - old)
        if self.full:
            return False
        beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            checksum = 0
            for part in parts:
                checksum = zlib.crc32(part, checksum)
            header = _HEADER.pack(_MAGIC, checksum, _named(name), size - _HEADER.size)
            with open(beside, "wb") as file:
                for part in (header, *parts):
                    file.write(part)
            os.replace(beside, path)
        except OSError:  # mostly ENOSPC
            self.full = True
            self._count(old - size)
            with suppress(OSError):
                beside.unlink()
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove an entry, if it is there."""
        self._unlink(self.path / name)

    def drop(self, folder: str) -> None:
        """Remove all entries of a folder, if there is one."""
        for path in _files(self.path / folder):
            self._unlink(path)
        shutil.rmtree(self.path / folder, ignore_errors=True)

    def close(self, keep: bool) -> None:
        """Close the folder. The last process of the run removes it, unless ``keep`` leaves it for a resumed run."""
        if self._lock < 0:
            return
        with suppress(OSError), _locked(self.path.parent / _LOCK):
            if not keep and _try_lock(self._lock, fcntl.LOCK_EX):
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    @property
    def used_bytes(self) -> int:
        """Bytes of the run's entries in this folder."""
        with suppress(OSError), open(self.path / _USED, "rb") as file:
            return int(file.read() or 0)
        return 0

    def _unlink(self, path: Path) -> None:
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._count(-size)

    def _count(self, more: int) -> bool:
        """Reserve so many bytes of the limit; return False, without a change, if they exceed it."""
        try:
            with self._mutex, _locked(self.path / _USED) as file:
                used = max(int(os.pread(file, 32, 0) or 0) + more, 0)
                if more > 0 and self.limit is not None and used > self.limit:
                    return False
                os.pwrite(file, b"%-31d\n" % used, 0)
        except OSError:  # the folder is gone, or the disk is full
            return more <= 0
        return True

    def _recount(self) -> None:
        used = 0
        for path in _files(self.path):
            if "." in path.name:
                with suppress(OSError):
                    path.unlink()
            else:
                used += path.stat().st_size
        with suppress(OSError):
            (self.path / _USED).write_bytes(b"%-31d\n" % used)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the entries in a folder, also unfinished ones."""
    for at, _, names in os.walk(folder):
        yield from (Path(at, name) for name in names if name not in (_LOCK, _USED))


def _remove_dead(root: Path) -> None:
    """Remove the folders of runs without a living process; a living one, as this one, holds a lock."""
    for path in root.iterdir():
        with suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR)
            try:
                if _try_lock(lock, fcntl.LOCK_EX):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def _named(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
