"""Short texts that ranks leave for each other in the process group's store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Any

logger = logging.getLogger(__name__)

_READ_WITHIN_S = 2.0


class Board:
    """Notices in the process group's store.

    The process that holds the store may be the one that died or stopped. So nothing here waits for it longer than about
    two seconds, and after the first failure it is not used any more.

    Attributes:
        appends: whether texts can be appended; not in a file store.
    """

    def __init__(self, store: Any) -> None:
        self._store = store.clone()  # a separate connection: the other one may be busy for long
        self._lost = False
        self.appends = bool(self._store.has_extended_api())

    def put(self, key: str, text: str, *, append: bool = False) -> None:
        """Write or append a text, without waiting for an answer."""
        if self._lost:
            return
        try:
            (self._store.append if append else self._store.set)(key, text)
        except (RuntimeError, OSError) as error:  # the store's host is gone; a later wait reports it
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
        """Close the connection; later writes and reads do nothing."""
        self._lost, self._store = True, None
