"""Signs of life on standard error from what takes more than a few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_EVERY_S = 5.0


@contextmanager
def progress(doing: str, every_s: float = _EVERY_S) -> Iterator[None]:
    """Say every few seconds what is being done and for how long, nothing where it is over before the first of them.

    It is said on the standard error of before, wherever the block itself redirects it to.
    """
    over, out = threading.Event(), sys.stderr
    started = time.monotonic()

    def tell() -> None:
        while not over.wait(every_s):
            print(f"{doing}: {time.monotonic() - started:.0f} s so far", file=out, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
