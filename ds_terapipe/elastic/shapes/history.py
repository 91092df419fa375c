"""History of a training's shapes: a file with a line of JSON for each change, written by the run, and read again.

A line holds from its step on: ``start`` if a process begins to train or resumes from a checkpoint, ``change`` if layers
froze or moved. ``end`` gives the number of steps; a killed process writes none. No DeepSpeed, no torch.
"""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ds_terapipe.elastic.policies.resize import Shape
from ds_terapipe.errors import ConfigError, bad_value
from ds_terapipe.json_files import Fields
from ds_terapipe.plan.result import quantity

KEY = "elastic_pipeline.history_path"
START, CHANGE, END = "start", "change", "end"
_BEGINS = b'{"event": "'  # of every line
_RULE, _USE = "a file that elastic_pipeline.history_path names", "that of a run"

logger = logging.getLogger(__name__)


class StepShape(NamedTuple):
    """The shape in which a step runs.

    Attributes:
        stages, replicas, micro_batch, micro_batches: see `resize.Shape`.
        frozen_layers: number of frozen entries, from the first one on.
        parts: first entry of each stage and, last, the number of entries.
        places: place of each stage; None: one stage on each.
    """

    stages: int
    replicas: int
    micro_batch: int
    micro_batches: int
    frozen_layers: int
    parts: tuple[int, ...]
    places: tuple[int, ...] | None = None

    @property
    def placed(self) -> list[tuple[int, int, int]]:
        """Place, first entry and the entry after the last one, of each stage."""
        places = range(self.stages) if self.places is None else self.places
        return [(place, *bounds) for place, bounds in zip(places, pairwise(self.parts), strict=True)]


def shape_text(shape: Shape | StepShape, several: bool = False) -> str:
    """Format a shape: ``2 stages x 1 replica (4 micro-batches of 1)``; ``several``: stages on a place."""
    word = "place" if several or getattr(shape, "places", None) else "stage"
    stages, replicas = quantity(shape.stages, word), quantity(shape.replicas, "replica")
    return f"{stages} x {replicas} ({quantity(shape.micro_batches, 'micro-batch')} of {shape.micro_batch})"


class History:
    """Writer of the history file, on one rank.

    Args:
        path: path of the file, to which lines are appended; checked by `check_history`.
    """

    def __init__(self, path: str) -> None:
        self._path: Path | None = Path(path)
        self._ran_on: StepShape | None = None  # shape of the last line
        self._steps = 0  # steps completed
        self._seconds = 0.0

    def changed(self, seconds: float) -> None:
        """Note the seconds of a change before the next step."""
        self._seconds += seconds

    @contextmanager
    def step(self, step: int, ran_on: StepShape, topology: Any) -> Iterator[None]:
        """Context manager around a step that writes a line if something has changed since the step before.

        Args:
            step: 0-based ``global_steps``.
            ran_on: shape of the step.
            topology: DeepSpeed's topology, with the stage of each rank.
        """
        resumes = self._ran_on is None or step != self._steps
        if self._ran_on is None:
            self._mend()
            atexit.register(self.close)  # for scripts that do not destroy their engine
        if resumes or ran_on != self._ran_on:
            line = {"event": START if resumes else CHANGE, "step": step, "time": time.time(), "seconds": self._seconds}
            ranks = [[at.pipe, at.data] for at in map(topology.get_coord, range(topology.world_size()))]
            self._write({**line, **ran_on._asdict(), "ranks": ranks})
            self._ran_on, self._seconds = ran_on, 0.0
        self._steps = step
        yield
        self._steps = step + 1

    def close(self) -> None:
        """Write the number of steps, once."""
        if self._ran_on is not None:
            self._write({"event": END, "step": self._steps, "time": time.time()})
            self._ran_on = None
        atexit.unregister(self.close)

    def _mend(self) -> None:
        """Remove an unfinished last line of a killed run."""
        if self._path is not None and self._path.is_file():
            content = self._path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                self._path.write_bytes(whole)

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # the training continues
            logger.error("%s: cannot write %s (%s)", KEY, self._path, error.strerror or error)
            self._path = None


@dataclass(frozen=True)
class Period:
    """Steps of one shape, with the same layers frozen.

    Attributes:
        first: first step, 0-based.
        stop: the first step after it; None: not recorded.
        ran_on: shape of the steps.
        ranks: stage and replica of each process.
        begins: whether a process began with it, or resumed from a checkpoint.
        change_seconds: duration of the change before it.
        begun: start time in seconds since 1970.
        seconds: from its first step to its last, with all that was done between them; None: not recorded.
    """

    first: int
    stop: int | None
    ran_on: StepShape
    ranks: tuple[tuple[int, int], ...]
    begins: bool
    change_seconds: float
    begun: float
    seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return all fields except the start time."""
        fields = {**asdict(self), **self.ran_on._asdict()}
        del fields["ran_on"], fields["begun"]
        return fields


def check_history(path: str) -> None:
    """Refuse an existing file that is no history: `History` would remove its last line as unfinished.

    Raises:
        ConfigError: naming the first line that no run has written.
    """
    try:
        *lines, rest = Path(path).read_bytes().split(b"\n") if Path(path).is_file() else (b"",)
    except OSError as error:
        raise bad_value(KEY, path, f"a file that can be read ({error.strerror})", "another name") from error
    wrong = next((number for number, line in enumerate(lines, start=1) if not _is_line(line)), None)
    if wrong is None and not (rest.startswith(_BEGINS) or _BEGINS.startswith(rest)):
        wrong = len(lines) + 1
    if wrong is not None:
        got = f"{path} (line {wrong})"
        raise ConfigError(f"{KEY}: got {got}, must be a new file or one that a run has written, use another name")


def _is_line(line: bytes) -> bool:
    try:
        fields = _fields(line.decode(), KEY)
        fields.one_of("event", (START, CHANGE, END))
        _whole(fields, "step"), fields.number("time")
    except (ConfigError, UnicodeDecodeError):
        return False
    return True


def read_history(path: str) -> list[Period]:
    """Read the periods of a training, in the order of its steps.

    If a run resumes from a checkpoint, later steps of the runs before it are dropped. An unfinished last line of a
    killed run is ignored.

    Raises:
        ConfigError: the file is missing, or no history; in one line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise ConfigError(f"{path}: cannot be read ({why}), must be {_RULE}, use {_USE}") from error
    found: list[Period] = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        fields = _fields(line, f"{path}:{number}")
        event = fields.one_of("event", (START, CHANGE, END))
        step, at = _whole(fields, "step"), fields.number("time")
        if event == START:
            found = [period for period in found if period.first < step]
            if found and (found[-1].stop is None or found[-1].stop > step):
                found[-1] = replace(found[-1], stop=step, seconds=None)
        elif not found or found[-1].stop is not None or step < found[-1].first:
            raise fields.fail("event", f'"{START}", or after one and at a later step', "an unedited file")
        else:
            taken = fields.number("seconds") if event == CHANGE else 0.0
            found[-1] = replace(found[-1], stop=step, seconds=max(at - taken - found[-1].begun, 0.0))
        if event != END:
            found.append(_period(fields, event, step, at))
    found = [period for period in found if period.stop != period.first]
    if not found:
        raise ConfigError(f"{path}: has no step in it, must be {_RULE}, use {_USE}")
    return found


def _fields(line: str, where: str) -> Fields:
    try:
        data = json.loads(line)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise bad_value(where, line, f"a line of {_RULE}", _USE)
    return Fields(data, where)


def _period(fields: Fields, event: str, step: int, at: float) -> Period:
    stages, replicas, *_ = numbers = [_whole(fields, name) for name in StepShape._fields[:-2]]
    parts, places, ranks = (fields.value(name) for name in ("parts", "places", "ranks"))
    if places is not None and (not _numbers(places) or {*places} != {*range(stages)}):
        raise fields.fail("places", f"a place of 0 to {stages - 1} for each stage", _USE)
    count = len(places or range(stages))
    if not _numbers(parts) or len(parts) != count + 1 or any(a >= b for a, b in pairwise(parts)):
        raise fields.fail("parts", f"where {count} stages begin and the last one ends", _USE)
    if not isinstance(ranks, list) or not all(_numbers(rank) and len(rank) == 2 for rank in ranks):
        raise fields.fail("ranks", "[stage, replica] of each process", _USE)
    if not ranks or any(stage >= stages or replica >= replicas for stage, replica in ranks):
        raise fields.fail("ranks", f"of {stages} stages and {replicas} replicas", _USE)
    whose = tuple((int(stage), int(replica)) for stage, replica in ranks)
    ran_on = StepShape._make([*numbers, tuple(parts), places and tuple(places)])
    return Period(step, None, ran_on, whose, event == START, fields.number("seconds"), at)


def _whole(fields: Fields, name: str) -> int:
    value = fields.value(name)
    if not _numbers([value]):
        raise fields.fail(name, "an integer of 0 or more", "e.g. 0")
    return int(value)


def _numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
