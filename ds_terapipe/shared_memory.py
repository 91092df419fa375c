"""DeepSpeed's buffers in shared memory, of 67 MB for each rank of a launch on CPU, which stay there when the launch has ended.

Its op ``deepspeed_shm_comm`` makes a file for each rank of a job on one machine, and every rank maps those of all. The memory is
there for as long as a process has it mapped; the name is of no use once all ranks have. So it is taken away then, and whatever
ends the processes leaves nothing behind.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FOLDER = Path("/dev/shm")
_NAMES = "deepspeed_allreduce_buffer_*"


class Buffer(NamedTuple):
    """A file in shared memory."""

    path: str
    bytes: int


def release() -> None:
    """Take the names of this job's buffers away, if it has some; collective, after ``deepspeed.init_distributed``."""
    from ds_terapipe.job import Job

    if _mapped("self"):
        Job.current().agree(None)  # all ranks are past the op's own start, in which they map each other's
        _unlink()


def release_at_exit() -> None:
    """Remove the names at the interpreter's exit, for failures before :func:`release`."""
    atexit.unregister(_unlink)
    atexit.register(_unlink)


def left_behind() -> list[Buffer]:
    """Return this user's buffers that no process has mapped any more, by name."""
    found = []
    in_use = {path for process in _processes() for path in _mapped(process)}
    for path in sorted(FOLDER.glob(_NAMES)):
        with suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and str(path) not in in_use:
                found.append(Buffer(str(path), status.st_size))
    return found


def _unlink() -> None:
    for path in _mapped("self"):
        with suppress(OSError):  # another rank was faster
            os.unlink(path)


def _mapped(process: str) -> set[str]:
    """Buffers that a process has mapped, and whose names are there."""
    beginning = str(FOLDER / _NAMES[:-1])
    try:
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    paths = {line[line.index(beginning) :] for line in lines if beginning in line}
    return {path for path in paths if not path.endswith(" (deleted)")}


def _processes() -> Iterator[str]:
    with suppress(OSError):
        yield from (name for name in os.listdir("/proc") if name.isdigit())
