"""Summarise, draw and merge traces.

Print each stage's time of computing, of waiting for each other stage, and its bubble. token_pipeline.trace_path and
`ds_terapipe simulate` with --trace write traces.

example:
  ds_terapipe trace trace.json                                       per stage: busy, bubble, waits
  ds_terapipe trace trace.json --step 4 --picture step4.svg
  ds_terapipe trace trace.json predicted.json --merged both.json     measured and predicted in one file for Perfetto
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ds_terapipe.commands.output import show, write_text, writing
from ds_terapipe.commands.progress import progress
from ds_terapipe.errors import ConfigError
from ds_terapipe.schedule import Action, Panel, timelines_svg
from ds_terapipe.schedule.replay import Interval
from ds_terapipe.tracing.chrome import PREDICTED, Event, read, write
from ds_terapipe.tracing.summary import as_table, summarise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="Chrome trace files")
    parser.add_argument("--step", type=int, metavar="N", help="step to read (default: all; for a picture: the last)")
    parser.add_argument("--picture", metavar="FILE", help="draw the traces below each other into an SVG file")
    parser.add_argument("--merged", metavar="FILE", help="write all events into one Chrome trace file")


@progress("reading")
def run(options: argparse.Namespace) -> None:
    """Print the summary; write the picture and the merged file where asked."""
    runs = [(name, _chosen(name, read(name), options.step)) for name in options.files]
    lines = [line for _, events in runs for line in summarise(events)]
    if options.merged:
        with writing("--merged", options.merged):
            write(options.merged, [event for _, events in runs for event in events])
    if options.picture:
        panels = [panel for name, events in runs for panel in panels_of(Path(name).stem, events)]
        write_text("--picture", options.picture, timelines_svg(panels))
    show(options, as_table(lines), {"stages": [line._asdict() for line in lines]})


def _chosen(name: str, events: list[Event], step: int | None) -> list[Event]:
    steps = sorted({event.step for event in events})
    if step is not None and step not in steps and any(event.run == "measured" for event in events):
        raise ConfigError(f"--step: got {step}, {name} has steps {', '.join(map(str, steps)) or 'none'}")
    if not any(event.action for event in events):
        raise ConfigError(f"{name}: has no actions in it, must be a trace of at least one step")
    return [event for event in events if step is None or event.step == step or event.run != "measured"]


def panels_of(title: str, events: Sequence[Event]) -> list[Panel]:
    """One panel a run of the trace, its last step, the first rank of each stage; times in milliseconds from the step's start."""
    panels = []
    for run in sorted({event.run for event in events}):
        actions = [(event, event.action) for event in events if event.run == run]
        timed = [(event, action) for event, action in actions if action is not None]
        last = max(event.step for event, _ in timed)
        first_rank: dict[int, int] = {}
        for event, _ in timed:
            first_rank[event.stage] = min(event.rank, first_rank.get(event.stage, event.rank))
        shown = [(e, a) for e, a in timed if e.step == last and e.rank == first_rank[e.stage]]
        zero = min(event.start for event, _ in shown)
        grid: list[list[Action]] = [[] for _ in range(max(first_rank) + 1)]
        intervals: list[list[Interval]] = [[] for _ in grid]
        for event, action in sorted(shown, key=lambda pair: pair[0].start):
            grid[event.stage].append(action)
            intervals[event.stage].append(Interval(1e3 * (event.start - zero), 1e3 * (event.end - zero)))
        what = run if run == PREDICTED else f"{run}, step {last}"
        panels.append(Panel(f"{title}: {what}, ms", grid, intervals))
    return panels
