"""Progress on standard error for commands that take more than a few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 5.0


@contextmanager
def progress(doing: str) -> Iterator[None]:
    """Context manager that prints every few seconds the current work and its duration.

    Nothing is printed for short work. Lines go to the standard error of before, even if the block redirects it.
    """
    over, out = threading.Event(), sys.stderr
    started = time.monotonic()

    def tell() -> None:
        while not over.wait(_EVERY_S):
            print(f"{doing}: {time.monotonic() - started:.0f} s so far", file=out, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
