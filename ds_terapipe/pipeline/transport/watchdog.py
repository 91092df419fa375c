"""Waits of a stage for another: timed, bounded, and explained when they fail.

A wait that fails or lasts too long ends in a report: who waited for whom and for what, the schedule's grid and the
action of each stage. A thread of each process writes its position to the process group's store about once a second;
ranks read the others' there, also that of a process which has ended.

On a device with streams, the stream waits for messages, and the host continues: a blocked host could not launch later
work. Then the same thread watches the stream itself. Every wait leaves a mark behind it, and the first mark that the
stream has not reached tells the stage's action. A stream that reaches no mark for ``timeout_s`` is reported like a
host's wait.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed

from ds_terapipe.errors import first_line
from ds_terapipe.job import Job, RankFailed
from ds_terapipe.names import QUEUES
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.transport import guard
from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.pipeline.transport.positions import Position, Positions, whereabouts
from ds_terapipe.pipeline.transport.processes import Processes
from ds_terapipe.pipeline.transport.stream import Mark, take_device
from ds_terapipe.schedule import Action

logger = logging.getLogger(__name__)

_PUBLISH_EVERY_S = 1.0
_LAUNCH_LOOKS = 5  # looks at the processes per look at the positions
_JOINS_WITHIN_S = 2.0
_GRACE_S = 5.0  # time for the wait's own timeout, before the watching thread ends the process
_LAST_RESORT_S = 60.0
_STOPPED_FOR_S = 10.0  # time beyond the longest wait, in which the others name a stopped rank
_EXIT_CODE = 70  # EX_SOFTWARE
_HOST = torch.device("cpu")
# On one GPU that stages shared, first steps stood still with the variable, until all kernels were loaded at the start.
_ONE_QUEUE = f"{QUEUES} is 1: got one hardware queue, slices need no such setting, try without it"


class PipelineStalled(RuntimeError):
    """A stage waited for another that died, or did not answer within ``token_pipeline.timeout_s``."""


class Waiting(NamedTuple):
    """A running wait: its subject, its start (``time.monotonic``), and its bounds.

    Attributes:
        bounded: whether it lasts ``timeout_s`` at most; else as long as all ranks make progress.
        in_store: whether it waits for the process group's store, which does not report a dead rank.
    """

    what: str
    since: float
    bounded: bool = True
    in_store: bool = False


class _Passed(NamedTuple):
    """A wait issued to the stream: the mark behind it, its subject, time, step, action and grid."""

    mark: Mark
    what: str
    since: float
    step: int
    action: int
    grid: Sequence[Sequence[Action]]


_watchdogs = itertools.count()  # number of watchdogs in this process; all ranks make theirs in one order


class Watchdog(Observer):
    """Knows this rank's action and wait.

    Args:
        view: this rank's view in its pipeline; a step may change it (:meth:`begin`). None: there is no engine yet.
        timeout_s: longest wait, in seconds.
        new_mark: puts a mark on the device's current stream; None: the host waits for messages.
        device: device of the marks.
        job: job of the ranks; None: of all processes of the launch.

    Attributes:
        ended: why this rank's steps have failed; empty while they have not.
        processes: processes of the ranks on this machine, complete once all have started.
        waited_s: seconds of the step in which this rank only waited.
    """

    def __init__(
        self,
        view: RankView | None,
        timeout_s: float,
        new_mark: Callable[[], Mark] | None = None,
        device: torch.device = _HOST,
        job: Job | None = None,
    ) -> None:
        self.timeout_s, self.job = timeout_s, job or Job.current()
        self._new_mark, self._device = new_mark, device
        self._marks: deque[_Passed] = deque()  # marks that the stream has not reached, as far as is known
        self._marks_lock, self._progress = threading.Lock(), 0.0
        self.waited_s = 0.0
        self._view = view
        self._grid: Sequence[Sequence[Action]] = ()
        self._step, self._index = 0, 0
        self._stands = (0, 0), time.monotonic()  # step and action of the host, and since when
        self._waiting: Waiting | None = None
        self.ended = ""
        self._board = Board(self.job.store)
        self._positions = Positions(self._board, self.job, next(_watchdogs))
        self.processes = Processes(self._board, self.job.rank)
        self.processes.learn()
        self._gone_since: float | None = None
        self._closed, self._giving_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ds_terapipe-watchdog", daemon=True)
        self._thread.start()
        # a thread inside the store at the interpreter's exit would crash the process
        atexit.register(self.close)

    def begin(self, step: int, grid: Sequence[Sequence[Action]], view: RankView) -> None:
        """Begin a step with the schedule ``grid`` on this view; the waiting time restarts at 0."""
        self._step, self._grid, self._index, self._view, self.waited_s = step, grid, 0, view, 0.0

    def action_begins(self, index: int, action: Action) -> None:
        """Record that this rank has come to action ``index`` of its row of the grid."""
        self._index = index

    def action_ends(self, action: Action) -> None:
        """Record the end of the action."""
        self._index += 1

    @contextmanager
    def waiting(
        self, what: str, *, counts: bool = True, bounded: bool = True, in_store: bool = False
    ) -> Iterator[None]:
        """Context manager around a blocking wait for other processes. Raises PipelineStalled when it fails.

        ``what`` completes "waited for". ``counts``: whether the time is nothing but waiting, and belongs to
        ``waited_s``. For the others see `Waiting`.
        """
        outer, mine = self._waiting, Waiting(what, time.monotonic(), bounded, in_store)
        if not bounded:
            self._positions.begin_to_watch()
        self._waiting = mine
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, (PipelineStalled, RankFailed)) or not _is_communication(error):
                raise
            if self._giving_up.is_set():  # Python's exit beside the thread that ends the process may abort
                self._thread.join()
            self._waiting = None  # the report takes a while
            raise PipelineStalled(self._report(mine, first_line(error))) from error
        finally:
            if counts and outer is None:
                self.waited_s += time.monotonic() - mine.since
            self._waiting = outer

    def making_groups(self) -> AbstractContextManager[None]:
        """Context manager around the making of groups by all ranks, all of which are ready for it.

        Torch waits half an hour for a rank that died before it came to its group.
        """
        return self.waiting("all ranks to make their groups", counts=False, in_store=True)

    @property
    def group_timeout_s(self) -> float:
        """Timeout of a process group whose messages this watchdog waits for.

        Only the host's waits end by it. The thread ends a stream's waits. The group's own watchdog is the last resort:
        it counts from the issue of a message, which for a receive is long before any wait.
        """
        return self.timeout_s if self._new_mark is None else 2 * self.timeout_s + _LAST_RESORT_S

    def wait(self, work: Any, what: str) -> None:
        """Wait for one message: on the host, or with streams on the current stream."""
        if self._new_mark is None:
            self.wait_on_host(work, what)
            return
        with self.waiting(what):
            work.wait()
        passed = _Passed(self._new_mark(), what, time.monotonic(), self._step, self._index, self._grid)
        self._drop_reached()  # a mark may keep objects alive, so reached ones are dropped
        with self._marks_lock:
            self._marks.append(passed)

    def wait_on_host(self, work: Any, what: str) -> None:
        """Wait on the host until a message has arrived."""
        with self.waiting(what):
            work.wait(timedelta(seconds=self.timeout_s))

    def _drop_reached(self) -> _Passed | None:
        """Drop the marks that the stream has reached; return the first that it has not."""
        with self._marks_lock:
            while self._marks and self._marks[0].mark.is_completed():
                self._marks.popleft()
                self._progress = time.monotonic()
            return self._marks[0] if self._marks else None

    def _late(self) -> Waiting | None:
        """Return the wait of the stream that has exceeded the timeout; None if there is none."""
        first = self._drop_reached()
        if first is None:
            return None
        since = max(first.since, self._progress)
        return Waiting(first.what, since) if time.monotonic() - since > self.timeout_s else None

    def _where(self) -> tuple[int, int, Sequence[Sequence[Action]]]:
        """Return step, action and grid of this stage: the host's, or the stream's, which may be far behind."""
        first = self._drop_reached()
        return (self._step, self._index, self._grid) if first is None else (first.step, first.action, first.grid)

    def failed(self, error: BaseException) -> None:
        """Publish that this rank's step failed, so that waiting ranks read the reason."""
        if not self.ended:
            self.ended = f"failed: {type(error).__name__}: {first_line(error)}"
            self._publish()

    def close(self) -> None:
        """End the watching thread."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOINS_WITHIN_S)
        if not self._thread.is_alive():
            self._board.close()
        guard.leave(self)
        atexit.unregister(self.close)

    def _run(self) -> None:
        take_device(self._device)
        self._publish()
        # a launcher that sees a process die ends the others within a second, maybe before they wait for it
        looks = _LAUNCH_LOOKS if self._view is None else 1
        for look in itertools.count(1):
            if self._closed.wait(_PUBLISH_EVERY_S / looks):
                return
            if look % looks == 0:
                self._publish()
                if self._view is None:
                    self.processes.learn()  # ranks start one by one
            waiting, late = self._waiting, self._late()
            if waiting is not None and self._is_over(waiting):
                late = waiting  # the main thread is inside a collective of a group with a longer timeout
            stuck = self._stuck() if waiting is None and late is None else None
            late, reason = (late, "no answer") if stuck is None else (stuck, "another rank has ended")
            if late is not None:  # the main thread, or the stream, cannot be woken
                self._giving_up.set()
                logger.error("%s", self._report(late, reason))
                sys.stderr.flush()
                os._exit(_EXIT_CODE)

    def _stuck(self) -> Waiting | None:
        """Return an action that has gone on for ``timeout_s`` while another rank has ended: its layer waits for the device.

        A hardware queue that a message holds keeps computations back of which no message is awaited.
        """
        here, now = (self._step, self._index), time.monotonic()
        if here != self._stands[0]:
            self._stands = here, now
        since = self._stands[1]
        acts = self._view is not None and self._grid and self._index < len(self._grid[self._view.place])
        if not acts or now - since < self.timeout_s:
            return None
        others = self._positions.of_others()
        if others is None:
            ended = self._positions.store_is_silent(self.timeout_s)
        else:
            ended = any(position.ended for position in others.values())
        return Waiting("its own action", since) if ended or self.processes.gone() else None

    def _is_over(self, waiting: Waiting) -> bool:
        """Whether a wait has exceeded its limit."""
        now = time.monotonic()
        if waiting.bounded and now - waiting.since > self.timeout_s + _GRACE_S:
            return True
        return (waiting.in_store and self._someone_is_gone(now)) or (
            not waiting.bounded and self._positions.someone_is_silent(now, self.timeout_s)
        )

    def _someone_is_gone(self, now: float) -> bool:
        """Whether a process has ended, and the main thread has had time to notice it."""
        gone = self.processes.gone()
        if gone and self._gone_since is None:
            lost = [f"rank {rank} ({why})" for rank, why in self.processes.lost().items() if rank in gone]
            logger.error("rank %d: lost %s", self.job.rank, ", ".join(lost))
            self._gone_since = now
        return self._gone_since is not None and now - self._gone_since > _GRACE_S

    def _publish(self) -> None:
        waiting, note = self._waiting, self.ended
        if not note and waiting is not None:
            note = f"waits {time.monotonic() - waiting.since:.1f} s for {waiting.what}"
        step, action, _ = self._where()
        self._positions.publish(Position(time.time(), step, action, note, bool(self.ended)))
        guard.beat(self, self.timeout_s + _STOPPED_FOR_S)

    def _report(self, waiting: Waiting, reason: str) -> str:
        seconds = time.monotonic() - waiting.since
        step, action, grid = self._where()
        view = self._view
        me, where = ("", "") if view is None else (f" ({view.name})", f" in step {step}")
        first = (
            f"rank {self.job.rank}{me} waited {seconds:.1f} s for {waiting.what}{where}: {reason} "
            f"(token_pipeline.timeout_s is {self.timeout_s:g})"
        )
        if self.ended:
            return first
        logger.error("%s", first)  # at once: a launcher that sees a process die ends the others within a moment
        lines = [
            first,
            *(f"  rank {rank}: {why}" for rank, why in self.processes.look_for_lost(learns=view is None).items()),
        ]
        if self._device != _HOST and os.environ.get(QUEUES) == "1":
            lines.append("  " + _ONE_QUEUE)
        if len(lines) > 1:
            logger.error("%s", "\n".join(lines[1:]))
        self.ended = f"gave up waiting for {waiting.what}: {reason}"
        self._publish()
        return "\n".join([*lines, *whereabouts(self._positions, view, step, action, grid)])


@contextmanager
def launching(timeout_s: float, what: str = "all ranks to build their engines") -> Iterator[Watchdog]:
    """Context manager around the building of engines, without a time limit: a rank that dies or fails ends the others.

    They name it; PyTorch's own waits do not, and last half an hour while groups are made. ``what`` completes "waited for".
    """
    watchdog = Watchdog(None, timeout_s)
    try:
        with watchdog.waiting(what, bounded=False, in_store=True):
            yield watchdog
    except BaseException as error:
        watchdog.failed(error)
        raise
    finally:
        watchdog.close()


def _is_communication(error: RuntimeError) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "timed out", "connection", "socket"))
