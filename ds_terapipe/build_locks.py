"""Locks that a launch leaves behind which was killed while PyTorch compiled an extension: whoever comes later waits for ever.

DeepSpeed's ops are compiled by ``torch.utils.cpp_extension``, which waits in silence until a file named ``lock`` is gone, in
the folder of the extension. FusedLamb's op has locks that the kernel releases (``optim/op/jit.py``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

SAID_AFTER_S = 20.0


class Lock(NamedTuple):
    """A file that stands for a compilation that is going on, or was when its process ended."""

    path: str
    age_s: float


def locks() -> list[Lock]:
    """Those in PyTorch's folder of extensions, the oldest first, but for FusedLamb's, which end with their process."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    found = []
    for path in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        if path.parent.name.startswith("ds_terapipe_"):
            continue
        try:
            found.append(Lock(str(path), max(time.time() - path.stat().st_mtime, 0.0)))
        except OSError:  # gone by now
            continue
    return sorted(found, key=lambda lock: -lock.age_s)


@contextmanager
def waits_are_said() -> Iterator[None]:
    """While this is open, a wait for such a file says so, once, after `SAID_AFTER_S`."""
    from torch.utils.file_baton import FileBaton

    original = FileBaton.wait

    def wait(self: FileBaton) -> None:
        timer = threading.Timer(SAID_AFTER_S, _say, [str(self.lock_file_path)])
        timer.daemon = True
        timer.start()
        try:
            original(self)
        finally:
            timer.cancel()

    FileBaton.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileBaton.wait = original  # type: ignore[method-assign]


def _say(path: str) -> None:
    logger.warning(
        "waiting for %s, which another process holds while it compiles an extension; if none does (a launch was killed while it "
        "compiled), remove this file",
        path,
    )
