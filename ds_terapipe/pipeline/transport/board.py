"""Short texts that ranks leave for each other in the process group's store."""

from __future__ import annotations

import atexit
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

logger = logging.getLogger(__name__)

_CONNECTED_WITHIN_S = 20.0  # PyTorch would try for as long as groups may take to be made, half an hour by default
_READ_WITHIN_S = 2.0
_LEFT_WITHIN_S = 15.0  # at exit; a stopped host is killed about ten seconds after the longest wait, see guard.py


class Board:
    """Notices in the process group's store.

    The process that holds the store may have died, or may be stopped or busy. So one thread talks to the store, and
    callers wait for it two seconds at most, 20 for a connection. An answer that comes later ends the silence. After an
    error the store is not asked again.

    Attributes:
        appends: whether texts can be appended; not in a file store.
    """

    def __init__(self, store: Any) -> None:
        self.appends = bool(store.has_extended_api())
        self._failed = False
        self._unanswered_since: float | None = None
        self._calls = queue.SimpleQueue[tuple[Callable[[Any], object], threading.Event] | None]()
        self._thread = threading.Thread(target=self._run, args=(store,), name="ds_terapipe-board", daemon=True)
        self._thread.start()
        # a thread that returns from the store during the interpreter's exit aborts the process
        atexit.register(self.close, _LEFT_WITHIN_S)
        self._ask(lambda own: None).wait(_CONNECTED_WITHIN_S)

    def silent_s(self) -> float:
        """Return the seconds since a call that the store has not answered; infinite once it is gone or closed."""
        since = self._unanswered_since
        if self._failed or not self._thread.is_alive():
            return math.inf
        return 0.0 if since is None else time.monotonic() - since

    def put(self, key: str, text: str, *, append: bool = False) -> None:
        """Write or append a text, without waiting for an answer."""
        self._ask(lambda own: (own.append if append else own.set)(key, text))

    def read(self, keys: Collection[str]) -> dict[str, str] | None:
        """Return the texts under those of ``keys`` that exist; None if the store does not answer in time."""
        found: dict[str, str] = {}

        def look(own: Any) -> None:
            found.update({key: own.get(key).decode() for key in keys if own.check([key])})

        if self.silent_s() > _READ_WITHIN_S:
            return None
        answered = self._ask(look).wait(_READ_WITHIN_S)
        return found if answered and not self._failed else None

    def close(self, within_s: float = _READ_WITHIN_S) -> None:
        """Close the connection after the texts are written; later writes and reads do nothing."""
        self._calls.put(None)
        if threading.current_thread() is not self._thread:  # an engine may be collected in any thread
            self._thread.join(within_s)
        if not self._thread.is_alive():
            atexit.unregister(self.close)

    def _ask(self, call: Callable[[Any], object]) -> threading.Event:
        """Hand a call to the thread; return the event of its end."""
        ended = threading.Event()
        self._calls.put((call, ended))
        return ended

    def _run(self, store: Any) -> None:
        own = None  # a separate connection: the other one may be busy for long
        for call, ended in iter(self._calls.get, None):
            try:
                self._unanswered_since = time.monotonic()
                if not self._failed:
                    own = store.clone() if own is None else own
                    call(own)
            except (RuntimeError, OSError) as error:  # the store's host is gone; a later wait reports it
                logger.debug("the store does not answer: %s", error)
                self._failed = True
            self._unanswered_since = None
            ended.set()
