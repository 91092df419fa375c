"""Empty layers, built for weights from elsewhere: builders enter the context, initializers and readers ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_empty = ContextVar("ds_terapipe_empty", default=False)


@contextmanager
def skipping_init() -> Iterator[None]:
    """Context manager in which layers are built empty, for weights from elsewhere: none are read or drawn."""
    token = _empty.set(True)
    try:
        yield
    finally:
        _empty.reset(token)


def is_skipping_init() -> bool:
    """Whether a layer that is built now will be given its weights."""
    return _empty.get()
