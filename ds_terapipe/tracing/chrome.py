"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open, and back.

A process of the trace is a stage (of one replica and tensor-parallel rank), named after it; an event is an action or one of
the collectives that end a step. Times in the file are microseconds, as the format has it; here they are seconds. Format:
"Trace Event Format", complete events (``"ph": "X"``) and metadata (``"ph": "M"``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ds_terapipe.errors import ConfigError
from ds_terapipe.json_files import Fields, read_json, write_whole
from ds_terapipe.schedule import Action, Grid
from ds_terapipe.schedule.replay import Interval

FORMAT = "ds_terapipe trace 1"
MEASURED, PREDICTED = "measured", "predicted"


class Event(NamedTuple):
    """An event of one rank from ``start`` to ``end``, in seconds.

    ``name`` is the action's text form (``0F1.2``) or the name of something else (``optimiser``); ``kind`` its
    operation (``F``, ``B``, ``W``, ``SEND_F``, ...; else the name again). ``run`` tells measured from predicted events.
    """

    run: str
    rank: int
    stage: int
    step: int
    name: str
    kind: str
    start: float
    end: float

    @property
    def action(self) -> Action | None:
        """The action; None for other events."""
        try:
            return Action.from_text(self.name)
        except ValueError:
            return None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def events_of(grid: Grid, intervals: Sequence[Sequence[Interval]]) -> list[Event]:
    """A simulated schedule as events; rank and stage are the same number."""
    return [
        Event(PREDICTED, stage, stage, 0, str(action), str(action.op), interval.start, interval.end)
        for stage, row in enumerate(grid)
        for action, interval in zip(row, intervals[stage], strict=True)
    ]


def to_json(events: Iterable[Event], about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of a trace file. ``about`` (model, slices, versions, ...) goes into its metadata."""
    events = sorted(events, key=lambda event: (event.run, event.rank, event.start))
    processes: dict[tuple[str, int], int] = {}
    listed: list[dict[str, Any]] = []
    for event in events:
        process = processes.setdefault((event.run, event.rank), len(processes))
        listed.append(
            {
                "name": event.name,
                "cat": event.kind,
                "ph": "X",
                "ts": round(event.start * 1e6, 3),
                "dur": round(event.seconds * 1e6, 3),
                "pid": process,
                "tid": 0,
                "args": {"run": event.run, "rank": event.rank, "stage": event.stage, "step": event.step},
            }
        )
    stages = {(event.run, event.rank): event.stage for event in events}

    def metadata(process: int, name: str, value: object) -> dict[str, Any]:
        return {"name": f"process_{name}", "ph": "M", "pid": process, "args": {name: value}}

    named = [
        metadata(p, "name", f"stage {stages[run, rank]}, rank {rank}, {run}") for (run, rank), p in processes.items()
    ]
    ordered = [metadata(process, "sort_index", process) for process in processes.values()]
    return {
        "traceEvents": [*named, *ordered, *listed],
        "displayTimeUnit": "ms",
        "otherData": {"format": FORMAT, **(about or {})},
    }


def write(path: str | Path, events: Iterable[Event], about: dict[str, Any] | None = None) -> None:
    """Write a trace file, whole or not at all. Raises OSError where it cannot be written."""
    write_whole(path, json.dumps(to_json(events, about)))


def read(path: str | Path) -> list[Event]:
    """The events of a trace file.

    Raises:
        ConfigError: no such file, no JSON (a truncated file among them), not a trace of ours, or a broken event.
    """
    fields = read_json(path, "a trace file")
    events = fields.value("traceEvents")
    if not isinstance(events, list):
        raise fields.fail("traceEvents", "a list of events", "a file of token_pipeline.trace_path")
    Fields(fields.block("otherData", {}), fields.path("otherData")).one_of("format", (FORMAT,))
    return [
        _event(path, index, raw)
        for index, raw in enumerate(events)
        if not (isinstance(raw, dict) and raw.get("ph") == "M")  # metadata
    ]


def _event(path: str | Path, index: int, raw: Any) -> Event:
    try:
        where = raw["args"]
        start = float(raw["ts"]) / 1e6
        end = start + float(raw["dur"]) / 1e6
        if end < start:
            raise ValueError("a negative duration")
        return Event(
            str(where["run"]), int(where["rank"]), int(where["stage"]), int(where["step"]),
            str(raw["name"]), str(raw["cat"]), start, end,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{path}: traceEvents[{index}]: {problem}, must have name, cat, ts, dur and args with run, rank, stage and step"
        ) from error
