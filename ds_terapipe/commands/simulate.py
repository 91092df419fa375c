"""Time, draw and compare schedules.

Simulate the actions that the engine executes. Print the time of a step, the parts of its bubble and its memory. Without
costs, a sequence takes 1 forward and 2 backward on each stage.

example:
  ds_terapipe simulate --stages 4 --micro-batches 4 --slices 4 --picture timeline.svg         without costs
  ds_terapipe simulate --model gpt3-175b --stages 48 --tensor-parallel 8 --sequences 2 --slices 128x16
  ds_terapipe simulate --plan plan.json --measured costs.json --trace predicted.json          opens in Perfetto
  ds_terapipe simulate --model gpt3-13b --stages 8 --tensor-parallel 8 --sequences 8 --compare --picture compare.svg
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from ds_terapipe.commands.output import show, write_text, writing
from ds_terapipe.commands.planning.alternatives import panel
from ds_terapipe.commands.planning.compare import compare
from ds_terapipe.commands.planning.inputs import AUTO, Inputs, add_inputs, choose_plan, shown_time
from ds_terapipe.commands.planning.several import read_placed
from ds_terapipe.commands.progress import progress
from ds_terapipe.errors import bad_value
from ds_terapipe.plan.costs.memory import GIGABYTE, MemoryUse, as_dict, gigabytes
from ds_terapipe.plan.result import Plan, compact, memory_lines, option_name
from ds_terapipe.plan.stages import even
from ds_terapipe.schedule import Panel, Schedule, timelines_svg
from ds_terapipe.schedule.orders import INTERLEAVED
from ds_terapipe.schedule.placement import row_word
from ds_terapipe.tracing.chrome import events_of, write

_RULE = "a number of equal slices, or lengths in tokens"
_UNIT_SLICES = 4
DEFAULT_SCHEDULE = "1f1b"
_PARTS = ("busy", "idle", "fill", "imbalance", "messages")  # of a stage's time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    add_inputs(parser)
    parser.add_argument("--slices", metavar="N|L,L", help=f"{_RULE}: 8, or 512,512, or 128x16 (default: the best)")
    parser.add_argument("--plan", metavar="FILE", help="simulate the plan of this file")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare all schedules of slices with 1F1B and interleaved 1F1B without slices",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the timeline as an SVG file")
    parser.add_argument("--trace", metavar="FILE", help="write the predicted run as a Chrome trace")


@progress("simulating")
def run(options: argparse.Namespace) -> None:
    """Print a step's time; draw it and write its trace on request."""
    given = None if options.plan is None else Plan.load(options.plan)
    if given is not None and options.slices is not None:
        raise bad_value("--slices", options.slices, "absent beside --plan, which has slices", "one of the two")
    if options.compare and options.trace is not None:
        raise bad_value("--trace", options.trace, "absent beside --compare", "--picture, or one schedule")
    lengths = None if options.slices is None else slice_lengths(options.slices, options.seq_length)
    if lengths is not None and options.seq_length is None:
        options.seq_length = sum(lengths)
    inputs = read_placed(options, unit_costs=True, plan=given)
    multiple = inputs.request.multiple
    slices = _shared("--plan", given.slices, multiple) if given else named_lengths(inputs, options.slices)
    if options.compare:
        lines, data, panels = compare(inputs, slices, options.search)
    else:
        schedule, chosen = _chosen(inputs, options, given, slices)
        lines, data, panels = _one(inputs, schedule, chosen, options.trace)
    if options.picture:
        write_text("--picture", options.picture, timelines_svg(panels))
        lines.append(f"drawn in {options.picture}")
    if options.trace:
        lines.append(f"trace in {options.trace}")
    show(options, "\n".join(lines), data)


def slice_lengths(text: str, seq_length: int | None) -> tuple[int, ...] | None:
    """``512,512`` or ``128x16`` or both as lengths; None for a number of equal slices.

    Raises:
        ConfigError: any other text, or lengths that do not add up to ``seq_length``.
    """
    parts = [re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", part) for part in re.split(r",\s*|\s+", text.strip())]
    if None in parts:
        raise bad_value("--slices", text, _RULE, "e.g. 8, or 512,512, or 128x16")
    found = tuple(int(part[1]) for part in parts if part for _ in range(int(part[2] or 1)))
    if len(parts) == 1 and "x" not in text:
        return None
    if seq_length is not None and sum(found) != seq_length:
        rule = f"lengths that add up to the sequence, {seq_length} tokens, not {sum(found)}"
        raise bad_value("--slices", text, rule, f"e.g. {len(found)}")
    return found


def named_lengths(inputs: Inputs, text: str | None) -> tuple[int, ...] | None:
    """The slices that the argument or the configuration names; None where they are to be chosen."""
    total, multiple = inputs.request.seq_length, inputs.request.multiple
    if text is not None:
        found = slice_lengths(text, total)
        return _equal("--slices", total, int(text), multiple) if found is None else _shared("--slices", found, multiple)
    if inputs.slices == AUTO:
        return _equal("--seq-length", total, min(_UNIT_SLICES, total)) if inputs.units else None
    if isinstance(inputs.slices, int):
        return _equal("token_pipeline.slices", total, inputs.slices, multiple)
    if sum(inputs.slices) != total:  # type: ignore[arg-type]
        raise bad_value(
            "token_pipeline.slices",
            inputs.slices,
            f"lengths that add up to the sequence, {total} tokens",
            "--seq-length",
        )
    return _shared("token_pipeline.slices", tuple(inputs.slices), multiple)  # type: ignore[arg-type]


def _equal(key: str, total: int, count: int, multiple: int = 1) -> tuple[int, ...]:
    most = total // multiple
    if count > most:
        shared = f" / {multiple} devices that share them" if multiple > 1 else ""
        raise bad_value(key, count, f"at most the tokens of a sequence, {total}{shared}", str(min(8, most)))
    return tuple(multiple * length for length in even(most, count))


def _shared(key: str, lengths: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    if any(length % multiple for length in lengths):
        rule = f"multiples of the {multiple} devices that share the tokens (sequence parallelism)"
        raise bad_value(key, list(lengths), rule, str(len(lengths)))
    return lengths


def _chosen(
    inputs: Inputs, options: argparse.Namespace, given: Plan | None, slices: tuple[int, ...] | None
) -> tuple[str | Schedule, tuple[int, ...]]:
    """Return the schedule and the slices of the simulation."""
    if slices is None:
        best = choose_plan(inputs, search_s=options.search)
        return best.runs, best.slices
    if given is not None and options.schedule in (None, AUTO):
        return given.runs, slices
    request = inputs.request
    default = INTERLEAVED.name if request.placement.stages_per_place > 1 else DEFAULT_SCHEDULE
    return default if request.schedule == AUTO else request.schedule, slices


def _one(
    inputs: Inputs, schedule: str | Schedule, slices: tuple[int, ...], trace: str | None
) -> tuple[list[str], dict[str, Any], list[Panel]]:
    """Return one schedule's printed lines, its figures, and its picture."""
    request = inputs.request
    found = request.times(inputs.cost).simulate(schedule, slices)
    share = inputs.sequences / request.placement.stages_per_place
    memory = request.memory_of(schedule, slices)
    if trace is not None:
        about = {"schedule": str(schedule), "slices": list(slices), "costs": inputs.source.text}
        with writing("--trace", trace):
            write(trace, events_of(found.grid, found.intervals), about)
    data = {
        "schedule": str(schedule),
        "slices": list(slices),
        **inputs.figures,
        "weights_once": request.weights_once,
        "predicted_step_s": found.makespan + request.overhead_s,
        "overhead_s": request.overhead_s,
        "bubble": {"total": found.bubble, **found.bubble_shares},
        "per_stage": [
            {
                "stage": stage,
                **{f"{name}_s": getattr(result, name) for name in _PARTS},
                "live_units": result.peak_units,
                "live_tokens": result.peak_tokens * share,
                "live_sequences": result.peak_tokens / request.seq_length * share,
            }
            for stage, result in enumerate(found.places)
        ],
        "memory_bytes": [{"stage": stage, **as_dict(use)} for stage, use in enumerate(memory)],
    }
    title = option_name(schedule, slices)
    return _lines(inputs, data, memory), data, [panel(inputs, title, found, request.placement)]


def _lines(inputs: Inputs, data: dict[str, Any], memory: tuple[MemoryUse, ...]) -> list[str]:
    shown, where = shown_time(inputs.units), row_word(inputs.request.placement)
    bubble = data["bubble"]
    parts = ", ".join(f"{name} {bubble[name]:.1%}" for name in ("fill", "imbalance", "messages"))
    after = f", {shown(data['overhead_s'])} of it after the last action" if data["overhead_s"] else ""
    lines = [
        *inputs.lines,
        f"schedule: {data['schedule']}, {compact(data['slices'])} tokens",
        f"step {shown(data['predicted_step_s'])}{after}; bubble {bubble['total']:.1%} ({parts})",
        f"{where:>5}" + "".join(f"{name:>12}" for name in _PARTS) + f"{'live seqs':>11}{'live tokens':>13}",
    ]
    for row in data["per_stage"]:
        cells = "".join(f"{shown(row[f'{name}_s']):>12}" for name in _PARTS)
        lines.append(f"{row['stage']:>5}{cells}{row['live_sequences']:>11.2f}{row['live_tokens']:>13.0f}")
    limit = inputs.request.memory_gb
    lines += [line[2:] for line in memory_lines(memory, None if limit is None else limit * GIGABYTE, where)]
    if limit is not None and max((gigabytes(use.total) for use in memory), default=0.0) > limit:
        lines.append("  does not fit")
    return lines
