"""What this rank did during chosen steps, and when: recorded beside the engine, collected on rank 0, written as one file.

Off, it costs nothing: the engine calls its actions directly. On, an action costs two readings of a clock (on a GPU two
events on the stream, read after the step).
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.watch import Watch
from ds_terapipe.schedule import Action
from ds_terapipe.schedule.chrome import MEASURED, Event, write

logger = logging.getLogger(__name__)

DEFAULT_STEPS = (3, 5)  # of a run: the first two make buffers and inspect the model
_CALIBRATION = 1000

Execute: TypeAlias = Callable[[Action], None]


class Timing(NamedTuple):
    """One event of this rank; begin and end are marks of the recorder's clock."""

    name: str
    kind: str
    begin: Any
    end: Any


class HostClock:
    """Marks are ``time.perf_counter()``."""

    def now(self) -> float:
        """A mark."""
        return time.perf_counter()

    def start(self) -> float:
        """The mark that a step's times count from, and that second on the host's clock."""
        return time.perf_counter()

    def seconds(self, mark: float, start: float) -> float:
        """Seconds from ``start`` to ``mark``."""
        return mark - start


class StreamMarks:
    """Marks are events on the current CUDA stream: on a GPU the host only enqueues an action."""

    def now(self) -> torch.cuda.Event:
        """A mark."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> torch.cuda.Event:
        """As :meth:`HostClock.start`; the stream is empty at that moment, so the event is now."""
        torch.cuda.synchronize()
        return self.now()

    def seconds(self, mark: torch.cuda.Event, start: torch.cuda.Event) -> float:
        """Seconds from ``start`` to ``mark``, once the stream has got there."""
        mark.synchronize()
        return start.elapsed_time(mark) / 1000.0


class Recorder:
    """Records the steps ``first`` to ``last`` of the job and writes them to ``path``; the same on every rank.

    Args:
        path: of the Chrome trace; written whole by rank 0 after the last of the steps, or at :meth:`close`.
        steps: first and last step, counted from 1 as in the log; None: the third to the fifth of this run.
        stage: this rank's stage.
        watch: bounds the waits.
        group: a gloo group of all ranks.
        device: where the stage computes.
        about: goes into the file's metadata.
    """

    def __init__(
        self,
        path: str,
        steps: tuple[int, int] | None,
        stage: int,
        watch: Watch,
        group: Any,
        device: torch.device,
        about: dict[str, Any],
    ) -> None:
        self._path, self._steps, self._stage, self._watch, self._group = Path(path), steps, stage, watch, group
        self._clock: HostClock | StreamMarks = StreamMarks() if device.type == "cuda" else HostClock()
        self._about = about
        self._rank = torch.distributed.get_rank()
        self._timings: list[Timing] | None = None  # of the step that is being recorded
        self._events: list[Event] = []  # of all ranks, on rank 0
        self._written = False
        self._step, self._origin, self._zero = 0, 0.0, 0.0
        self._start: Any = None
        self._one_host = self._on_one_host()

    def begin(self, step: int) -> None:
        """A step, counted from 1, is about to run its actions; collective while recording."""
        if self._steps is None:
            self._steps = (step + DEFAULT_STEPS[0] - 1, step + DEFAULT_STEPS[1] - 1)
        first, last = self._steps
        if step > last and not self._written and not self._events:
            self._written = True
            logger.warning(
                "token_pipeline.trace_steps: got [%d, %d], but this run is at step %d already", first, last, step
            )
        self._timings = None
        if self._written or not first <= step <= last:
            return
        with self._watch.waiting("all ranks to start a traced step", counts=False):
            torch.distributed.barrier(group=self._group)
        self._start = self._clock.start()
        at = time.perf_counter()
        if not self._events and not self._origin:
            self._origin = self._zero_of_all(at)
        # several hosts have no common clock: there all ranks' times count from the moment they left the barrier
        self._zero = at - self._origin
        self._step, self._timings = step, []

    def recording(self, execute: Execute) -> Execute:
        """``execute`` itself, or where this step is recorded a function that records it."""
        return execute if self._timings is None else _timed(execute, self._timings, self._clock.now)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Record what ends a step: a reduction, the optimiser, the loss."""
        timings = self._timings
        if timings is None:
            yield
            return
        begin = self._clock.now()
        yield
        timings.append(Timing(name, name, begin, self._clock.now()))

    def end(self) -> None:
        """The step is over: bring the ranks' events together, and write the file after the last step; collective."""
        timings, self._timings = self._timings, None
        if timings is None:
            return
        mine = [
            Event(MEASURED, self._rank, self._stage, self._step, t.name, t.kind, self._at(t.begin), self._at(t.end))
            for t in timings
        ]
        gathered: list[Any] | None = [None] * torch.distributed.get_world_size() if self._rank == 0 else None
        with self._watch.waiting("the traces of all ranks", counts=False):
            torch.distributed.gather_object(mine, gathered, group=self._group)
        if gathered is not None:
            self._events += [Event(*event) for events in gathered for event in events]
            self._about.update(self._cost(len(timings), mine))
        assert self._steps is not None
        if self._step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what has been recorded, if that has not happened yet."""
        if self._rank == 0 and self._events and not self._written:
            try:
                write(self._path, self._events, self._about)
                steps = sorted({event.step for event in self._events})
                logger.info("trace of steps %d to %d written to %s", steps[0], steps[-1], self._path)
            except OSError as error:
                logger.error("token_pipeline.trace_path: cannot write %s (%s)", self._path, error.strerror or error)
        self._written = True
        self._events = []

    def _at(self, mark: Any) -> float:
        return self._zero + self._clock.seconds(mark, self._start)

    def _zero_of_all(self, at: float) -> float:
        """What this rank's clock showed when the trace's time was zero."""
        if not self._one_host:
            return at
        zero = torch.tensor([at], dtype=torch.float64)
        torch.distributed.broadcast(zero, 0, group=self._group)
        return float(zero)

    def _on_one_host(self) -> bool:
        names: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(names, platform.node(), group=self._group)
        return len(set(names)) == 1

    def _cost(self, events: int, recorded: list[Event]) -> dict[str, float]:
        """What recording cost: measured seconds of one event, and their share of the step."""
        action = Action.from_text("0F0.0")
        execute = _timed(_nothing, [], self._clock.now)
        started = time.perf_counter()
        for _ in range(_CALIBRATION):
            execute(action)
        cost = (time.perf_counter() - started) / _CALIBRATION
        seconds = max(event.end for event in recorded) - min(event.start for event in recorded)
        return {"events_per_step": events, "seconds_per_event": cost, "overhead": events * cost / max(seconds, 1e-9)}


class NoRecorder:
    """Stands where nothing is traced."""

    def begin(self, step: int) -> None:
        """Nothing."""

    def recording(self, execute: Execute) -> Execute:
        """``execute`` itself."""
        return execute

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Nothing."""
        yield

    def end(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def check_path(path: str) -> None:
    """Raise ConfigError where a trace could not be written: on rank 0, before the first step."""
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{Path(path).name}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"token_pipeline.trace_path: got {path}, must be a file that can be written ({error.strerror}), use e.g. trace.json"
        ) from error


def _timed(execute: Execute, timings: list[Timing], now: Callable[[], Any]) -> Execute:
    def timed(action: Action) -> None:
        begin = now()
        execute(action)
        timings.append(Timing(str(action), str(action.op), begin, now()))

    return timed


def _nothing(action: Action) -> None:
    pass
