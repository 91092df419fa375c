"""Short texts that ranks leave for each other in the process group's store."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any

logger = logging.getLogger(__name__)

_CONNECTED_WITHIN_S = 20.0  # PyTorch would try for as long as groups may take to be made, half an hour by default
_READ_WITHIN_S = 2.0
_ANSWERED_WITHIN_S = 15.0  # a stopped host is killed about ten seconds after the longest wait, see guard.py


class Board:
    """Notices in the process group's store.

    The process that holds the store may be the one that died or stopped. So nothing here waits for it longer than about
    two seconds, 20 for a connection, and after the first failure it is not used any more.

    Attributes:
        appends: whether texts can be appended; not in a file store.
    """

    def __init__(self, store: Any) -> None:
        made: list[Any] = [None]
        # a separate connection: the other one may be busy for long
        self._lost = not _done_within(_CONNECTED_WITHIN_S, lambda: made.append(store.clone()))
        self._store = made[-1]
        self.appends = not self._lost and bool(self._store.has_extended_api())

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
        store = self._store

        def look() -> None:
            for key in keys:
                if store.check([key]):
                    found[key] = store.get(key).decode()

        self._lost = self._lost or not _done_within(_READ_WITHIN_S, look)
        return None if self._lost else found

    def close(self) -> None:
        """Close the connection; later writes and reads do nothing."""
        self._lost, self._store = True, None


def _done_within(seconds: float, call: Callable[[], object]) -> bool:
    """Whether a call to the store ends in time, without an error."""
    done = threading.Event()

    def run() -> None:
        try:
            call()
        except (RuntimeError, OSError):  # the store's host is gone
            return
        done.set()

    caller = threading.Thread(target=run, name="ds_terapipe-board", daemon=True)
    caller.start()
    caller.join(seconds)
    if caller.is_alive():  # a thread that returns from the store during the interpreter's exit aborts the process
        atexit.register(caller.join, _ANSWERED_WITHIN_S)
    return done.is_set()
