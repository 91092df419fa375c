"""Short texts that ranks leave for each other in the process group's store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Any

logger = logging.getLogger(__name__)

_READ_WITHIN_S = 2.0


class Board:
    """The store as a place for notices.

    The process that holds the store may be the very one that died or stopped: nothing here waits for it longer than about
    two seconds, and after the first failure it is left alone.

    Attributes:
        appends: whether texts can be put behind others; a store that is a file can't.
    """

    def __init__(self, store: Any) -> None:
        self._store = store.clone()  # a connection of its own: the other one may be in use for long
        self._lost = False
        self.appends = bool(self._store.has_extended_api())

    def put(self, key: str, text: str, *, append: bool = False) -> None:
        """Write a text, in place of or behind what is there; no answer is waited for."""
        if self._lost:
            return
        try:
            (self._store.append if append else self._store.set)(key, text)
        except (RuntimeError, OSError) as error:  # the store's host is gone: a wait for it will say so
            self._lost = True
            logger.debug("can't write %s: %s", key, error)

    def read(self, keys: Collection[str]) -> dict[str, str] | None:
        """Return the texts under those of ``keys`` that exist; None if the store does not answer."""
        found: dict[str, str] = {}
        done, store = threading.Event(), self._store

        def look() -> None:
            try:
                for key in keys:
                    if store.check([key]):
                        found[key] = store.get(key).decode()
            except (RuntimeError, OSError):
                return
            done.set()

        if self._lost:
            return None
        reader = threading.Thread(target=look, name="ds_terapipe-board", daemon=True)
        reader.start()
        reader.join(_READ_WITHIN_S)
        self._lost = not done.is_set()
        return None if self._lost else found

    def close(self) -> None:
        """Give the connection up; nothing is written or read any more."""
        self._lost, self._store = True, None
