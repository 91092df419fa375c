"""Trace of a step: recorded on each rank beside the engine, collected on rank 0, written as one file.

A step that is not traced costs nothing. Otherwise an action costs two readings
of a clock (on a GPU two events on the stream, read after the step).
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch.distributed

from ds_terapipe.config import TokenPipelineConfig
from ds_terapipe.job import Job
from ds_terapipe.json_files import check_writable
from ds_terapipe.pipeline.clock import Clock
from ds_terapipe.pipeline.observe import Observer
from ds_terapipe.pipeline.transport.consensus import Consensus
from ds_terapipe.schedule import Action
from ds_terapipe.tracing.chrome import MEASURED, Event, write

logger = logging.getLogger(__name__)

DEFAULT_STEPS = (3, 5)  # of a run: the first two make buffers and inspect the model


class Timing(NamedTuple):
    """An event of this rank; begin and end are marks of the recorder's clock."""

    name: str
    kind: str
    begin: Any
    end: Any


class Recorder(Observer):
    """Records whole steps of this rank, on request, and gathers those of all ranks on rank 0.

    Args:
        stage: this rank's stage; a reshape changes the attribute of this name.
        consensus: consensus of the job.
        clock: of the stage's device.
    """

    def __init__(self, stage: int, consensus: Consensus, clock: Clock) -> None:
        self.stage, self._consensus, self._clock = stage, consensus, clock
        self._watchdog = consensus.watchdog
        self._timings: list[Timing] | None = None  # of the step that is being recorded
        self._step, self._zero = 0, 0.0
        self._origin: float | None = None
        self._start: Any = None
        self._begun: Any = None  # mark at the begin of an action

    def begin(self, step: int, wanted: bool) -> None:
        """Begin step ``step``; record it if ``wanted``, which is the same on every rank. Collective if so."""
        self._timings = None
        if not wanted:
            return
        with self._watchdog.waiting("all ranks to start a recorded step", counts=False):
            torch.distributed.barrier(group=self._consensus.group)
        self._clock.wait()
        self._start, at = self._clock.now(), time.perf_counter()
        if self._origin is None:
            self._origin = self._zero_of_all(at)
        self._zero = at - self._origin
        self._step, self._timings = step, []

    @property
    def watches(self) -> bool:
        """Whether the step is recorded."""
        return self._timings is not None

    def action_begins(self, index: int, action: Action) -> None:
        """Mark the begin of an action."""
        self._begun = self._clock.now()

    def action_ends(self, action: Action) -> None:
        """Record the action."""
        if self._timings is not None:
            self._timings.append(Timing(str(action), str(action.op), self._begun, self._clock.now()))

    @contextmanager
    def collective(self, name: str, waited_for: str = "", counts: bool = True) -> Iterator[None]:
        """Context manager that records an operation beside a step's actions: a reduction, the optimiser, a reshape.

        Args:
            name: of the operation.
            waited_for: what the operation waits for; empty: it bounds its own waits.
            counts: whether the wait counts as one for other stages.
        """
        with self._watchdog.waiting(waited_for, counts=counts) if waited_for else nullcontext():
            begin = None if self._timings is None else self._clock.now()
            yield
            if self._timings is not None:
                self._timings.append(Timing(name, name, begin, self._clock.now()))

    def end(self) -> list[Event]:
        """End the step; return the events of all ranks on rank 0, else an empty list. Collective if recorded."""
        timings, self._timings = self._timings, None
        if timings is None:
            return []
        rank = self._consensus.job.rank
        mine = [
            Event(MEASURED, rank, self.stage, self._step, t.name, t.kind, self._at(t.begin), self._at(t.end))
            for t in timings
        ]
        everyones = self._consensus.gather(mine, "the recorded steps of all ranks", counts=False)
        return [event for events in everyones for event in events] if self._consensus.job.is_first else []

    def _at(self, mark: Any) -> float:
        return self._zero + self._clock.seconds(mark, self._start)

    def _zero_of_all(self, at: float) -> float:
        """Return the reading of this rank's clock at the recorder's time zero.

        Processes of one host share a clock. Processes of several hosts do not: their times count from the moment they
        left the barrier.
        """
        said = self._consensus.gather((platform.node(), at), "the clocks of all ranks", counts=False)
        one_host = len({host for host, _ in said}) == 1
        return float(said[0][1]) if one_host else at


def new_trace(settings: TokenPipelineConfig, stages: int, consensus: Consensus) -> TraceFile:
    """Return the trace file of the settings; collective.

    Raises:
        ConfigError: on every rank, for a path that cannot be written.
    """
    path, steps = settings.trace_path, settings.trace_steps
    if path is not None:
        consensus.decide(lambda: check_writable("token_pipeline.trace_path", path, "e.g. trace.json"))
    about = {"schedule": settings.schedule, "slices": settings.slices, "stages": stages}
    return TraceFile(path, None if steps is None else (steps[0], steps[1]), about)


class TraceFile:
    """Trace file of ``token_pipeline.trace_path``.

    Args:
        path: path of the Chrome trace, written by rank 0 after the last step, or at :meth:`close`; None: no trace.
        steps: first and last step, counted from 1 as in the log; None: the third to the fifth of this run.
        about: metadata of the file.
    """

    def __init__(self, path: str | None, steps: tuple[int, int] | None, about: dict[str, Any]) -> None:
        self._path, self._steps, self._about = path, steps, about
        self._events: list[Event] = []
        self._done = path is None

    def describe(self, **about: Any) -> None:
        """Change the file's metadata for later steps."""
        self._about.update(about)

    def wants(self, step: int) -> bool:
        """Whether to record the step."""
        if self._done:
            return False
        if self._steps is None:
            self._steps = (step + DEFAULT_STEPS[0] - 1, step + DEFAULT_STEPS[1] - 1)
        first, last = self._steps
        if step > last:
            self._done = True
            if Job.current().is_first:
                logger.warning(
                    "token_pipeline.trace_steps: got [%d, %d], but this run is at step %d already", first, last, step
                )
        return first <= step <= last

    def keep(self, events: Sequence[Event]) -> None:
        """Keep events between two steps."""
        if not self._done:
            self._events += events

    def add(self, step: int, events: Sequence[Event]) -> None:
        """Keep the events of a step (those of all ranks, on rank 0), and write the file after the last one."""
        self.keep(events)
        if self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the file, unless that has happened."""
        if self._path is not None and self._events and not self._done:
            steps = sorted({event.step for event in self._events})
            try:
                write(self._path, self._events, self._about)
                logger.info("trace of steps %d to %d written to %s", steps[0], steps[-1], self._path)
            except OSError as error:
                logger.error("token_pipeline.trace_path: cannot write %s (%s)", self._path, error.strerror or error)
        self._done = True
        self._events = []
