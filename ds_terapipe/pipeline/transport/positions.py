"""Positions of all ranks, which they publish about once a second, and the lines of a report about them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ds_terapipe.job import Job
from ds_terapipe.pipeline.rank_view import RankView
from ds_terapipe.pipeline.transport.board import Board
from ds_terapipe.schedule import Action, grid_text

_SILENT_AFTER_S = 2.5  # time in which every living process publishes at least once
_LISTED_OUTSIDE = 8  # ranks of other pipelines that a report names


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
    """Table of all ranks' positions.

    Args:
        board: board of the job.
        job: ranks of the table, and this process's.
        table: name of the table: one for each watchdog.
    """

    def __init__(self, board: Board, job: Job, table: int) -> None:
        self.rank, self.ranks = job.rank, job.ranks
        self._board, self._table = board, f"ds_terapipe/position/{table}"
        self._seen: tuple[float, dict[int, Position]] | None = None  # by `someone_is_silent`

    def publish(self, position: Position) -> None:
        """Write this rank's position, without waiting for an answer."""
        self._board.put(self._key(self.rank), position.to_text())

    def of_others(self) -> dict[int, Position] | None:
        """Return the positions that other ranks have published; None if the store does not answer."""
        ranks = [rank for rank in self.ranks if rank != self.rank]
        texts = self._board.read([self._key(rank) for rank in ranks])
        if texts is None:
            return None
        found = {}
        for rank in ranks:
            with suppress(KeyError, ValueError):
                found[rank] = Position.from_text(texts[self._key(rank)])
        return found

    def observe(self) -> tuple[dict[int, Position] | None, set[int]]:
        """Return the others' positions, and the ranks that have stopped publishing; takes some seconds.

        It compares two reads, since clocks differ between machines. The rank with the store may end after its own
        report, between the two: then the first read counts.
        """
        before = self.of_others()
        if before is None or any(position.ended for position in before.values()):
            return before, set()
        time.sleep(_SILENT_AFTER_S)
        after = self.of_others()
        if after is None:
            return before, set()
        return after, {rank for rank, position in after.items() if position == before.get(rank)}

    def begin_to_watch(self) -> None:
        """Begin the time of :meth:`someone_is_silent`."""
        self._seen = None

    def someone_is_silent(self, now: float, after_s: float) -> bool:
        """Whether a rank has failed, or kept its position for so many seconds, or the store its silence.

        Ranks that have not started do not count.

        Args:
            now: ``time.monotonic()``; the store is asked every ``after_s`` seconds.
        """
        if self._seen is not None and now - self._seen[0] < after_s:
            return False
        before, found = self._seen, self.of_others()
        if found is None:  # the process with the store may only be busy, and then no rank's position has moved
            self._seen = None
            return self.store_is_silent(after_s)
        self._seen = now, found
        if before is None:
            return False
        return any(position.ended or position == before[1].get(rank) for rank, position in found.items())

    def store_is_silent(self, after_s: float) -> bool:
        """Whether the store is gone, or has not answered for so many seconds."""
        return self._board.silent_s() > after_s

    def _key(self, rank: int) -> str:
        return f"{self._table}/{rank}"


def whereabouts(
    positions: Positions, view: RankView | None, step: int, action: int, grid: Sequence[Sequence[Action]]
) -> list[str]:
    """Return lines with the positions of the ranks, and the grid.

    Args:
        positions: of all ranks.
        view: this rank's; None: there is no engine yet.
        step, action, grid: where this rank is.
    """
    known, silent = positions.observe()
    if known is None:
        known, lines = {}, ["  positions unknown: the process with the store (rank 0, or the launcher) does not answer"]
    else:
        lines = _outside(positions, view, known, silent)
        others = [] if view is None else [(view.at(p).name, r) for p, r in enumerate(view.ranks) if p != view.place]
        lines += [_describe(rank, known.get(rank), rank in silent, where) for where, rank in others]
    if view is None or not grid:
        return lines
    there = [(place, known.get(rank)) for place, rank in enumerate(view.ranks)]
    at = {place: found.action for place, found in there if found is not None and found.step == step}
    return [*lines, grid_text(grid, at={**at, view.place: action}, placement=view.placement)]


def _outside(
    positions: Positions, view: RankView | None, known: Mapping[int, Position], silent: Collection[int]
) -> list[str]:
    """Describe ranks of other pipelines that ended or fell silent: a wait for all ranks may be for one of them.

    Without an engine all others are of other pipelines, and the awaited rank may not have started at all.
    """
    here: Collection[int] = (positions.rank,) if view is None else view.ranks
    odd = [rank for rank in known if rank not in here and (rank in silent or known[rank].ended)]
    if view is None:
        odd += [rank for rank in positions.ranks if rank not in here and rank not in known]
    return [_describe(rank, known.get(rank), rank in silent) for rank in odd[:_LISTED_OUTSIDE]]


def _describe(rank: int, position: Position | None, silent: bool, view: str = "") -> str:
    where = f"  rank {rank}" + (f" ({view})" if view else "")
    if position is None:
        return f"{where}: position unknown"
    text = f"{where}: last seen in step {position.step}, action {position.action}"
    if position.note:
        text += f", {position.note}"
    return f"{text}; no sign of life for {_SILENT_AFTER_S} s" if silent else text
