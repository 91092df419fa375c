"""Entries of a cache as files: bytes under a name, in the memory of the machine first, then on a disk.

An entry stands under its name whole or not at all: it is written beside it and renamed. What is in it is checked when it is
read, so one that was torn, cut off or has a flipped bit is as good as none. Files are written and read, and never mapped: where
a tmpfs is full a write is an error that can be handled (ENOSPC), while touching a mapping ends the process by SIGBUS.

What is there stays until its level ends, or other samples come: where there is no room for all entries, those that are there
serve their share of every epoch, and taking one out for another would have none of them there when its turn comes.

Every process of a run that uses a folder holds a lock on it. A folder whose lock nobody holds is a dead run's: the next run
removes it, unless it is the one that goes on.
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
_HEADER = struct.Struct("<4sI16sQ")  # what it is, checksum, the name it was written under, bytes that follow
_MAGIC = b"DTC1"


class Tier:
    """The entries of a run in one folder.

    Args:
        root: of all runs.
        run: name of this one.
        limit: bytes that the entries of this run may take, of all processes of the machine together; None: any number.

    Attributes:
        root: as it was given.
        full: whether the last entry that was to be written did not fit.
    """

    def __init__(self, root: Path, run: str, limit: int | None) -> None:
        self.root, self.path, self.limit = root, root / run, limit
        self.full = False
        self._mutex = threading.Lock()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)  # of what a model makes of its user's data
        with _locked(root / _LOCK):  # lest a run that begins takes this one for a dead one
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
            alone = _try_lock(self._lock, fcntl.LOCK_EX)
            if alone:  # the first process, maybe after a crash: nobody is writing
                self._recount()
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            _remove_dead(root, self.path)

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
        """Put an entry under a name that may be there already; False where there is no room for it.

        Args:
            name: with a folder before the last slash, which is made.
            parts: its bytes, one after the other.
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
        except OSError:  # above all, no space left
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
        """Let go of the folder. The last process of the run removes it, unless it is to be kept for one that goes on."""
        if self._lock < 0:
            return
        with suppress(OSError), _locked(self.path.parent / _LOCK):
            if not keep and _try_lock(self._lock, fcntl.LOCK_EX):
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1

    @property
    def used_bytes(self) -> int:
        """That the entries of the run take in here."""
        with suppress(OSError), open(self.path / _USED, "rb") as file:
            return int(file.read() or 0)
        return 0

    def _unlink(self, path: Path) -> None:
        with suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._count(-size)

    def _count(self, more: int) -> bool:
        """Take so many bytes of the limit; False, and nothing taken, where it has not so many."""
        try:
            with self._mutex, _locked(self.path / _USED) as file:
                used = max(int(os.pread(file, 32, 0) or 0) + more, 0)
                if more > 0 and self.limit is not None and used > self.limit:
                    return False
                os.pwrite(file, b"%-31d\n" % used, 0)
        except OSError:  # the folder is gone, or there is not even room for a number
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
    """The entries in a folder, those that are being written too."""
    for at, _, names in os.walk(folder):
        yield from (Path(at, name) for name in names if name not in (_LOCK, _USED))


def _remove_dead(root: Path, mine: Path) -> None:
    """Remove the folders of runs of which no process lives."""
    for path in root.iterdir():
        if path == mine or not (path / _LOCK).is_file():
            continue
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
