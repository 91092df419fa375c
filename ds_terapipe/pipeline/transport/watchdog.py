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
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.transport import guard
from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.pipeline.transport.processes import Processes
from ds_terapipe.pipeline.transport.stream import Mark, take_device
from ds_terapipe.schedule import Action, grid_text

logger = logging.getLogger(__name__)

_PUBLISH_EVERY_S = 1.0
_LAUNCH_LOOKS = 5  # looks at the processes per look at the positions
_SILENT_AFTER_S = 2.5  # time in which every living process publishes at least once
_JOINS_WITHIN_S = 2.0
_LOOKS, _BETWEEN_LOOKS_S = 5, 0.1  # time until a process with broken connections is gone
_GRACE_S = 5.0  # time for the wait's own timeout, before the watching thread ends the process
_LAST_RESORT_S = 60.0
_STOPPED_FOR_S = 10.0  # time beyond the longest wait, in which the others name a stopped rank
_LISTED_OUTSIDE = 8  # ranks of other pipelines that a report names
_EXIT_CODE = 70  # EX_SOFTWARE
_HOST = torch.device("cpu")


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


class Position(NamedTuple):
    """A rank's last report: when (``time.time``), in which step, at which action, and its state."""

    written: float
    step: int
    action: int
    note: str = ""
    ended: bool = False  # the note says why

    def to_text(self) -> str:
        """Return one line; :meth:`from_text` is its inverse."""
        return f"{self.written:.3f} {self.step} {self.action} {int(self.ended)} {self.note}"

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Parse a text of :meth:`to_text`; raises ValueError for any other."""
        written, step, action, ended, note = text.split(" ", 4)
        return cls(float(written), int(step), int(action), note, bool(int(ended)))


class Positions:
    """Table of all ranks' positions."""

    def __init__(self, board: Board, rank: int, table: object = 0) -> None:
        self._board, self._rank, self._table = board, rank, f"ds_terapipe/position/{table}"

    def publish(self, position: Position) -> None:
        """Write this rank's position, without waiting for an answer."""
        self._board.put(self._key(self._rank), position.to_text())

    def read(self, ranks: Sequence[int]) -> dict[int, Position] | None:
        """Return the positions of those of ``ranks`` that have published one; None if the store does not answer."""
        texts = self._board.read([self._key(rank) for rank in ranks])
        if texts is None:
            return None
        found = {}
        for rank in ranks:
            with suppress(KeyError, ValueError):
                found[rank] = Position.from_text(texts[self._key(rank)])
        return found

    def _key(self, rank: int) -> str:
        return f"{self._table}/{rank}"


_engines = itertools.count()  # number of engines in this process; all ranks make theirs in one order


class Watchdog(Observer):
    """Knows this rank's action and wait.

    Args:
        view: this rank's view in its pipeline; a step may change it (:meth:`begin`). None: there is no engine yet.
        timeout_s: longest wait, in seconds.
        new_mark: puts a mark on the device's current stream; None: the host waits for messages.
        device: device of the marks.
    """

    def __init__(
        self,
        view: RankView | None,
        timeout_s: float,
        new_mark: Callable[[], Mark] | None = None,
        device: torch.device = _HOST,
    ) -> None:
        self.timeout_s = timeout_s
        self._new_mark, self._device = new_mark, device
        self._marks: deque[_Passed] = deque()  # marks that the stream has not reached, as far as is known
        self._marks_lock, self._progress = threading.Lock(), 0.0
        self.waited_s = 0.0
        self._view = view
        self._rank = torch.distributed.get_rank() if view is None else view.ranks[view.place]
        self._world_size = torch.distributed.get_world_size()
        self._grid: Sequence[Sequence[Action]] = ()
        self._step, self._index = 0, 0
        self._stands = (0, 0), time.monotonic()  # step and action of the host, and since when
        self._waiting: Waiting | None = None
        self.ended = ""  # reason why this rank's steps failed
        self._board = Board(_get_default_store())
        self._positions = Positions(self._board, self._rank, "launch" if view is None else next(_engines))
        self._processes = Processes(self._board, self._rank)
        self.learn_processes()
        self._gone_since: float | None = None
        self._seen: tuple[float, dict[int, Position] | None] | None = None  # during a wait without a limit
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
        self._seen = self._seen if bounded else None
        self._waiting = mine
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PipelineStalled) or not _is_communication(error):
                raise
            if self._giving_up.is_set():  # Python's exit beside the thread that ends the process may abort
                self._thread.join()
            self._waiting = None  # the report takes a while
            raise PipelineStalled(self._report(mine, _first_line(error))) from error
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

    def learn_processes(self) -> None:
        """Read the processes of the ranks on this machine; complete once all have started."""
        self._processes.learn()

    def failed(self, error: BaseException) -> None:
        """Publish that this rank's step failed, so that waiting ranks read the reason."""
        if not self.ended:
            self._end(f"failed: {type(error).__name__}: {_first_line(error)}")

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
                    self.learn_processes()  # ranks start one by one
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
        others = self._positions.read([rank for rank in range(self._world_size) if rank != self._rank])
        ended = others is None or any(position.ended for position in others.values()) or self._processes.gone()
        return Waiting("its own action", since) if ended else None

    def _is_over(self, waiting: Waiting) -> bool:
        """Whether a wait has exceeded its limit."""
        now = time.monotonic()
        if waiting.bounded and now - waiting.since > self.timeout_s + _GRACE_S:
            return True
        return (waiting.in_store and self._someone_is_gone(now)) or (
            not waiting.bounded and self._someone_is_silent(now)
        )

    def _someone_is_gone(self, now: float) -> bool:
        """Whether a process has ended, and the main thread has had time to notice it."""
        gone = self._processes.gone()
        if gone and self._gone_since is None:
            lost = [f"rank {rank} ({why})" for rank, why in self._processes.lost().items() if rank in gone]
            logger.error("rank %d: lost %s", self._rank, ", ".join(lost))
            self._gone_since = now
        return self._gone_since is not None and now - self._gone_since > _GRACE_S

    def _someone_is_silent(self, now: float) -> bool:
        """Whether a rank has failed, or kept its position for ``timeout_s``; unstarted ranks do not count."""
        if self._seen is not None and now - self._seen[0] < self.timeout_s:
            return False
        before, found = self._seen, self._positions.read([r for r in range(self._world_size) if r != self._rank])
        self._seen = now, found
        if before is None:
            return False
        had = before[1] or {}
        return found is None or any(position.ended or position == had.get(rank) for rank, position in found.items())

    def _publish(self) -> None:
        waiting, note = self._waiting, self.ended
        if not note and waiting is not None:
            note = f"waits {time.monotonic() - waiting.since:.1f} s for {waiting.what}"
        step, action, _ = self._where()
        self._positions.publish(Position(time.time(), step, action, note, bool(self.ended)))
        guard.beat(self, self.timeout_s + _STOPPED_FOR_S)

    def _end(self, note: str) -> None:
        self.ended = note
        self._publish()

    def _report(self, waiting: Waiting, reason: str) -> str:
        seconds = time.monotonic() - waiting.since
        step, action, grid = self._where()
        view = self._view
        me, where = ("", "") if view is None else (f" ({view.name})", f" in step {step}")
        first = (
            f"rank {self._rank}{me} waited {seconds:.1f} s for {waiting.what}{where}: {reason} "
            f"(token_pipeline.timeout_s is {self.timeout_s:g})"
        )
        if self.ended:
            return first
        logger.error("%s", first)  # at once: a launcher that sees a process die ends the others within a moment
        lines = [first, *(f"  rank {rank}: {why}" for rank, why in self._look_for_lost().items())]
        if len(lines) > 1:
            logger.error("%s", "\n".join(lines[1:]))
        self._end(f"gave up waiting for {waiting.what}: {reason}")
        lines += self._whereabouts(view, step, action, grid)
        return "\n".join(lines)

    def _look_for_lost(self) -> dict[int, str]:
        """Return ranks of this machine that are gone or stopped; retries, as connections break before a process
        ends."""
        for _ in range(_LOOKS):
            if self._view is None:
                self.learn_processes()
            found = self._processes.lost()
            if found:
                return found
            time.sleep(_BETWEEN_LOOKS_S)
        return {}

    def _whereabouts(
        self, view: RankView | None, step: int, action: int, grid: Sequence[Sequence[Action]]
    ) -> list[str]:
        """Return lines with the positions of the ranks."""
        known, silent = self._observe()
        if known is None:
            known, lines = (
                {},
                ["  positions unknown: the process with the store (rank 0, or the launcher) does not answer"],
            )
        else:
            lines = self._outside(known, silent)
            others = (
                []
                if view is None
                else [(view.at(p).name, rank) for p, rank in enumerate(view.ranks) if p != view.place]
            )
            lines += [_describe(rank, known.get(rank), rank in silent, where) for where, rank in others]
        if view is None or not grid:
            return lines
        at = {place: known[rank].action for place, rank in enumerate(view.ranks) if _is_at(known.get(rank), step)}
        return [*lines, grid_text(grid, at={**at, view.place: action}, placement=view.placement)]

    def _outside(self, known: Mapping[int, Position], silent: Collection[int]) -> list[str]:
        """Describe ranks of other pipelines that ended or fell silent: a wait for all ranks may be for one of them.

        Without an engine all others are of other pipelines, and the awaited rank may not have started at all.
        """
        here: Collection[int] = (self._rank,) if self._view is None else self._view.ranks
        odd = [rank for rank in known if rank not in here and (rank in silent or known[rank].ended)]
        if self._view is None:
            odd += [rank for rank in range(self._world_size) if rank not in here and rank not in known]
        return [_describe(rank, known.get(rank), rank in silent) for rank in odd[:_LISTED_OUTSIDE]]

    def _observe(self) -> tuple[dict[int, Position] | None, set[int]]:
        """Return all ranks' positions, and the ranks that have stopped publishing.

        It compares two reads, since clocks differ between machines. The rank with the store may end after its own
        report, between the two: then the first read counts.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        before = self._positions.read(others)
        if before is None or any(position.ended for position in before.values()):
            return before, set()
        time.sleep(_SILENT_AFTER_S)
        after = self._positions.read(others)
        if after is None:
            return before, set()
        return after, {rank for rank, position in after.items() if position == before.get(rank)}


def _describe(rank: int, position: Position | None, silent: bool, view: str = "") -> str:
    where = f"  rank {rank}" + (f" ({view})" if view else "")
    if position is None:
        return f"{where}: position unknown"
    text = f"{where}: last seen in step {position.step}, action {position.action}"
    if position.note:
        text += f", {position.note}"
    return f"{text}; no sign of life for {_SILENT_AFTER_S} s" if silent else text


def _is_at(position: Position | None, step: int) -> bool:
    return position is not None and position.step == step


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).splitlines()), "")
    line = re.sub(r"^\[\S+:\d+\] ", "", line)  # gloo's messages begin with a source location
    return line.split(". This is typically caused by")[0][:300]


@contextmanager
def launching(timeout_s: float) -> Iterator[Watchdog]:
    """Context manager around the building of engines, without a time limit: a rank that dies or fails ends the others.

    They name it; PyTorch's own waits do not, and last half an hour while groups are made.
    """
    watchdog = Watchdog(None, timeout_s)
    try:
        with watchdog.waiting("all ranks to build their engines", bounded=False, in_store=True):
            yield watchdog
    except BaseException as error:
        watchdog.failed(error)
        raise
    finally:
        watchdog.close()


# PyTorch 2.14 made it public, and warns of the old name
_set_timeout: Callable[[timedelta, Any], None] = getattr(torch.distributed, "set_timeout", None) or (
    distributed_c10d._set_pg_timeout
)


def bounded_group(ranks: Sequence[int] | None, timeout_s: float, backend: str | None = None) -> Any:
    """Make a process group whose operations end after ``timeout_s``; collective. ``ranks`` None: all of the job.

    Its creation has the job's own timeout, since processes may arrive at very different times.
    """
    try:
        group = torch.distributed.new_group(ranks, backend=backend)
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        hint = "use GLOO_SOCKET_IFNAME, the network interface that all machines share"
        raise RuntimeError(f"{_first_line(error)}: gloo could not connect all ranks, {hint}") from error
    if group is not torch.distributed.GroupMember.NON_GROUP_MEMBER:
        _set_timeout(timedelta(seconds=timeout_s), group)
    return group


def _is_communication(error: RuntimeError) -> bool:
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "timed out", "connection", "socket"))
